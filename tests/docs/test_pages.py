"""Links lead somewhere, headings that others link to exist, and the navigation names every page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import benchmarks
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, headings, links, slug
from tests.ui.pictures import FOLDER, MAX_BYTES, PICTURES

LINKED = [*PAGES, ROOT / "CHANGELOG.md"]
NAV = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def broken(path: Path) -> Iterator[str]:
    """What a reader who follows the links of ``path`` does not find."""
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, heading = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        if not target.exists():
            yield f"{link}: no such file"
        elif DOCS in path.parents and DOCS not in target.parents:
            yield f"{link}: the site has only what is in docs/"
        elif heading and headings(target).count(heading) != 1:
            yield f"{link}: {headings(target).count(heading)} such headings"


@pytest.mark.parametrize("path", LINKED, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    assert list(broken(path)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One, two\n# Twice\n# Twice\n"
        "[a](#one-two) [b](#one) [c](gone.md) [d](#twice) ![e](gone.png) [f](https://x.y/z)\n"
    )
    assert list(broken(page)) == [
        "#one: 0 such headings",
        "gone.md: no such file",
        "#twice: 2 such headings",
        "gone.png: no such file",
    ]
    assert slug("`paceline.client`: Résumé & more") == "pacelineclient-résumé--more"


def test_the_navigation_names_every_page_once() -> None:
    named = sorted(pages_of(NAV))
    there = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert named == there, "the navigation of zensical.toml names each page of docs/, once"


@pytest.mark.parametrize("folder", ["adr", "lab-log", "studies"])
def test_indexes_link_to_every_page_beside_them(folder: str) -> None:
    index = DOCS / folder / "README.md"
    there = {path.name for path in index.parent.glob("*.md")} - {"README.md"}
    assert there <= set(links(index))


def test_the_recipes_are_listed_and_short() -> None:
    pages = sorted((DOCS / "use" / "recipes").glob("*.md"))
    listed = [link for link in links(DOCS / "use" / "recipes.md") if link.startswith("recipes/")]
    assert sorted(listed) == [f"recipes/{page.name}" for page in pages] and len(pages) == 10
    for page in pages:
        assert len(page.read_text().splitlines()) <= 36, page.name


def test_the_first_page_links_to_every_page() -> None:
    """Decisions, studies and the lab log by way of their indexes."""
    indexes = {DOCS / folder / "README.md" for folder in ("adr", "lab-log", "studies")}
    behind = {path.parent for path in indexes}
    there = {path for path in DOCS.rglob("*.md") if path.parent not in behind} | indexes
    there.remove(DOCS / "index.md")
    assert {str(path.relative_to(DOCS)) for path in there} <= set(links(DOCS / "index.md"))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_page_begins_with_its_title(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert (
        len(re.findall(r"^# ", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)) == 1
    )


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_targets_that_a_page_names_exist(path: Path) -> None:
    """So does the command of each figure, where it is one of make's."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    assert set(re.findall(r"`(?:[A-Z]+=\S+ )*make ([a-z][\w-]*)", text)) <= targets
    assert set(re.findall(r"make bench NAME=([a-z_]+)", text)) <= set(benchmarks())


def test_each_case_of_choose_a_policy_has_a_command() -> None:
    page = (DOCS / "start/choose-a-policy.md").read_text()
    flags = re.findall(r"^\| [^|]+ \| `(--[^|]*)` \|", page, re.MULTILINE)
    assert len(flags) >= 10
    tried = {
        line
        for block in blocks(DOCS / "start/choose-a-policy.md")
        if block.mark is not None and block.mark.word == "run"
        for line in block.code.splitlines()
    }
    assert {f"paceline serve {words}" for words in flags} <= tried


def test_pictures_are_made_by_the_command_and_small() -> None:
    there = {path.stem: path.stat().st_size for path in FOLDER.glob("*.png")}
    assert set(there) == set(PICTURES), "make pictures"
    assert max(there.values()) <= MAX_BYTES
