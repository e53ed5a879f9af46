"""The examples of docs/structured-outputs.md, tools.md, client.md and clients.md run as written.

Against the null backend, so answers are gibberish of the right form; `make test-clients` runs those
of clients.md against the default model, each in its client's own environment.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.servers import ServerProcess, start_server
from tests.clients.page import ADDRESS, example

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page, number, language, code)
    for page in ("structured-outputs.md", "tools.md", "client.md")
    for number, (language, code) in enumerate(BLOCK.findall((DOCS / page).read_text()))
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server("--backend", "null", "--served-model-name", "smollm2-135m") as live:
        yield live


def run(language: str, code: str, server: ServerProcess) -> str:
    assert ADDRESS in code
    if language == "bash" and shutil.which("curl") is None:
        pytest.skip("this machine has no curl")
    start = ["bash", "-euc"] if language == "bash" else [sys.executable, "-W", "error", "-c"]
    done = subprocess.run(
        [*start, code.replace(ADDRESS, server.address)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("language", "code"),
    [block[2:] for block in BLOCKS],
    ids=[f"{block[0]}-{block[1]}" for block in BLOCKS],
)
def test_examples(language: str, code: str, server: ServerProcess) -> None:
    assert run(language, code, server).strip()


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_clients_that_are_here(client: str, server: ServerProcess) -> None:
    assert run(*example(client), server).strip()


def test_every_page_has_examples() -> None:
    assert {block[0] for block in BLOCKS} == {"structured-outputs.md", "tools.md", "client.md"}
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize(
    "page",
    ["structured-outputs.md", "tools.md", "client.md", "clients.md", "api.md", "embeddings.md"],
)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
        assert "://" in link or (DOCS / link).exists(), link
