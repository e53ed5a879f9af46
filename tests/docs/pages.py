"""The pages as a reader's viewer takes them apart: headings, links, code blocks and their marks.

A code block is marked by a comment right before it, which no viewer shows:

    <!-- run-quick -->              a test of `make test` runs it
    <!-- run-quick with --rate 9 --> the same, with these words behind each paceline command
    <!-- run -->                    a test of `make test-all` runs it
    <!-- run by tests/FILE.py -->   that test runs it, because it needs more than a shell
    <!-- not-run: REASON -->        nobody does, and why
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = [
    "DOCS",
    "PAGES",
    "ROOT",
    "Block",
    "Mark",
    "blocks",
    "headings",
    "links",
    "not_run",
    "slug",
]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# what is on the site, and what only the repository has
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

_MARK = re.compile(
    r"<!-- (?P<word>run-quick|run|not-run)(?: with (?P<extra>.+?))?"
    r"(?: by (?P<by>tests/[\w./]+))?(?:: (?P<reason>.+?))? -->\s*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Mark:
    # run-quick, run or not-run
    word: str
    # words behind each paceline command
    extra: str = ""
    # the test that runs it instead
    by: str = ""
    # why it is not run
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    # the first line of its code, from 1
    line: int
    # of the fence; empty of an indented block
    language: str
    code: str
    # None where there is no comment before it, or one that does not read as a mark
    mark: Mark | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def _tokens(path: Path) -> tuple[Token, ...]:
    return tuple(MarkdownIt("commonmark").enable("table").parse(path.read_text()))


def slug(heading: str) -> str:
    """The name by which a link finds a heading: GitHub's, and the site's by zensical.toml."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@cache
def headings(path: Path) -> tuple[str, ...]:
    tokens = _tokens(path)
    found = []
    for before, token in itertools.pairwise(tokens):
        if before.type == "heading_open":
            text = "".join(child.content for child in token.children or ())
            found.append(slug(text))
    return tuple(found)


@cache
def links(path: Path) -> tuple[str, ...]:
    """Targets of links and pictures, as written."""
    found = []
    for token in _tokens(path):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                found.append(str(target))
    return tuple(found)


@cache
def blocks(path: Path) -> tuple[Block, ...]:
    found = []
    before = None
    for token in _tokens(path):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            found.append(
                Block(
                    page=str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path),
                    line=token.map[0] + (2 if token.type == "fence" else 1),
                    language=token.info.strip(),
                    code=token.content,
                    mark=_mark(before),
                )
            )
        before = token
    return tuple(found)


def _mark(token: Token | None) -> Mark | None:
    if token is None or token.type != "html_block":
        return None
    # several comments may stand there; the last one is the block's
    match = _MARK.fullmatch(token.content[token.content.rfind("<!--") :])
    if match is None:
        return None
    return Mark(*(match[name] or "" for name in ("word", "extra", "by", "reason")))


def not_run() -> list[str]:
    """A line for each block that is not run: where, why, and how it begins."""
    return [
        f"{block}: {block.mark.reason} | {block.code.strip().splitlines()[0][:60]}"
        for path in PAGES
        for block in blocks(path)
        if block.mark is not None and block.mark.word == "not-run"
    ]


if __name__ == "__main__":
    print(*not_run(), sep="\n")
