"""The examples of docs/use/clients.md whose clients are here run as written.

Against the null backend, so answers are gibberish of the right form; `make test-clients` runs all
of them against the default model, each in its client's own environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.servers import ServerProcess, start_server
from tests.clients.page import ADDRESS, example

DOCS = Path(__file__).parent.parent / "docs"


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


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_clients_that_are_here(client: str, server: ServerProcess) -> None:
    assert run(*example(client), server).strip()
