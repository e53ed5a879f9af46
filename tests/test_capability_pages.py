"""The examples of docs/use/clients.md whose clients are here run as written.

Against the null backend, so answers are gibberish of the right form; `make test-clients` runs all
of them against the default model, each in its client's own environment.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_clients_that_are_here(
    client: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    language, code = example(client)
    assert language == "python" and ADDRESS in code
    exec(code.replace(ADDRESS, server.address), {})
    assert capsys.readouterr().out.strip()
