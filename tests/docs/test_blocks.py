"""Every code block of README, CONTRIBUTING and docs is marked, and does what its mark says.

``run-quick`` against the null backend in `make test`, ``run`` with the default model in
`make test-docs`. `python -m tests.docs.pages` prints those that are not run, with the reasons.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.checkpoints.architectures import granite
from paceline.cli.main import build_parser
from tests.cli.servers import start_server
from tests.docs.pages import PAGES, ROOT, Block, blocks, not_run

ALL = [block for path in PAGES for block in blocks(path)]
# drawings, output, files and commands that take a machine, a network or an hour: no more than now
MOST_NOT_RUN = 64
ADDRESS = re.compile(r"(?<=http://)(?:127\.0\.0\.1|localhost):8000|localhost:8000")


def marked(word: str) -> list[Block]:
    return [block for block in ALL if block.mark and block.mark.word == word and not block.mark.by]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reader tries examples: a folder for each, with the same files, and a server."""

    # holds `paceline`
    programs: Path
    files: Mapping[str, str]
    root: Path
    # host and port
    server: str

    def run(self, block: Block) -> str:
        assert block.mark is not None
        code, extra = (ADDRESS.sub(self.server, text) for text in (block.code, block.mark.extra))
        folder = Path(tempfile.mkdtemp(dir=self.root))
        (folder / ".venv").symlink_to(self.programs.parent)
        for name, text in self.files.items():
            (folder / name).write_text(text)
        python = block.language == "python"
        start = (
            [sys.executable, "-W", "error", "-c"] if python else ["bash", "-eo", "pipefail", "-c"]
        )
        done = subprocess.run(
            [*start, code],
            capture_output=True,
            text=True,
            errors="replace",
            cwd=folder,
            timeout=110,
            env=os.environ
            | {
                "PATH": f"{self.programs}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "EXTRA": extra,
                "KEY": "sk-example",
                "XDG_STATE_HOME": str(folder / "state"),
            },
        )
        assert done.returncode == 0, f"{block}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("reader")
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True)
    paceline = programs / "paceline"
    python = f"exec {sys.executable} -m"
    paceline.write_text(
        f'#!/bin/sh\ncase "$1" in\nserve) shift; {python} tests.docs.serves "$@" $EXTRA ;;\n'
        f'*) {python} paceline.cli.main "$@" $EXTRA ;;\nesac\n'
    )
    paceline.chmod(0o755)
    rows = [f"{0.05 * number:.2f},20,3\n" for number in range(20)]
    files = {
        "keys": f"alice user {'0' * 64}\n",
        "azure.csv": "arrived_at_s,prompt_tokens,output_tokens\n" + "".join(rows),
    }
    with start_server(
        "--backend", "null", "--served-model-name", "smollm2-135m", "--batch-dir", str(folder / "b")
    ) as server:
        yield Place(programs, files, folder, server.address.removeprefix("http://"))


def test_every_block_is_marked() -> None:
    unmarked = [str(block) for block in ALL if block.mark is None]
    assert not unmarked, "run-quick, run or not-run: see tests/docs/pages.py"
    for block in ALL:
        assert block.mark is not None
        if block.mark.word == "not-run":
            assert len(block.mark.reason) > 5, f"{block}: not-run wants a reason"
            assert not block.mark.by and not block.mark.extra, block


def test_a_test_that_runs_a_block_knows_its_page() -> None:
    for block in ALL:
        if block.mark is not None and block.mark.by:
            source = (ROOT / block.mark.by).read_text()
            assert Path(block.page).name in source, f"{block}: {block.mark.by} is of another page"


def test_few_blocks_are_not_run() -> None:
    assert len(not_run()) <= MOST_NOT_RUN


@pytest.mark.parametrize("block", marked("run-quick"), ids=str)
def test_quick_examples(block: Block, place: Place) -> None:
    if "curl " in block.code and shutil.which("curl") is None:
        pytest.skip("this machine has no curl")
    printed = place.run(block)
    if "troubleshooting" not in block.page:
        # curl ends well whatever the server says
        assert not re.search(r'"error": ?\{', printed), printed


@pytest.mark.docs
@pytest.mark.parametrize("block", marked("run"), ids=str)
def test_other_examples(block: Block, place: Place) -> None:
    place.run(block)


@pytest.mark.parametrize("block", [x for x in ALL if x.language in ("", "sh", "bash")], ids=str)
def test_commands_exist_whether_they_are_run_or_not(block: Block) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    parser = build_parser()
    for line in block.code.replace("\\\n", " ").splitlines():
        # what follows two spaces, or a hash, is said to people
        command = re.split(r"  +(?=[^\s-])| &(?: |$)| \d?>", line.strip())[0]
        make = re.match(r"(?:\w+=\S+ )*make ([a-z][\w-]*)", command)
        if make:
            assert make[1] in targets, line
        ours = re.match(r"(?:\S+=\S+ |echo .*\| |\.venv/bin/)*paceline (?=[a-z])(.*)", command)
        if ours and "..." not in command and " $" not in command:
            words = shlex.split(ours[1], comments=True)
            assert callable(parser.parse_args(words).run), line


def test_the_architecture_on_a_page_is_the_one_that_runs() -> None:
    """docs/use/models.md shows all of it."""
    (block,) = [b for b in blocks(ROOT / "docs/use/models.md") if b.language == "python"]
    assert block.code == Path(str(granite.__file__)).read_text()
