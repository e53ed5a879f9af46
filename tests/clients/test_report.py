"""What `make test-clients` says of its runs, without a client or a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.common.processes import Unavailable
from tests.clients import __main__ as clients
from tests.clients.__main__ import CLIENTS, Client, converse, main, node_setup
from tests.clients.page import example
from tests.clients.report import CAPABILITIES, Outcome, failures, table

SCRIPT = """
import json, sys
url, key, model = sys.argv[1:4]
print("a warning of the library's own")
print(json.dumps({"capability": "chat", "error": None, "seconds": 0}))
print(json.dumps({"capability": "stream", "error": f"{url} said no", "seconds": 0}))
"""
FAKE = Client("fake", "fake", "fake.py", tuple(set(CAPABILITIES) - {"chat", "stream", "tools"}))


def test_a_script_is_read_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "fake.py"
    script.write_text(SCRIPT)
    steps = converse([sys.executable, str(script)], "http://here", "key", FAKE)
    assert steps == {"chat": None, "stream": "http://here said no"}
    outcome = Outcome("1.2", None, steps, FAKE.wanted)
    assert failures({"fake": outcome}) == [
        "fake: stream: http://here said no",
        "fake: tools: the script ended before it",
    ]
    header, row = table({"fake": outcome}).splitlines()
    assert dict(zip(header.split()[:4], row.split()[:4], strict=True)) == {
        "client": "fake", "version": "1.2", "models": "-", "chat": "ok",
    }  # fmt: skip
    assert row.count("FAIL") == 2


def test_an_absent_client_is_no_failure_but_is_told() -> None:
    outcome = Outcome(absent="no such package", wanted=CAPABILITIES)
    assert failures({"x": outcome}) == []
    assert "absent  no such package" in table({"x": outcome})


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients.shutil, "which", lambda _: None)
    (npm,) = [client for client in CLIENTS if client.script.endswith(".mjs")]
    with pytest.raises(Unavailable, match="node is not on this machine"):
        node_setup(npm, tmp_path)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nobody"]) == 2
    assert "nobody: not among openai, " in capsys.readouterr().err


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_has_its_script_pins_and_example(client: Client) -> None:
    script = (clients.HERE / client.script).read_text()
    shown = {name for name in CAPABILITIES if f'step("{name}"' in script} | {"docs"}
    assert shown == set(client.wanted)
    assert example(client.name)[1]
    if not client.script.endswith(".mjs"):
        lines = (clients.HERE / "requirements" / f"{client.name}.txt").read_text().split()
        assert all("==" in line for line in lines)
        assert any(line.startswith(f"{client.package}==") for line in lines)
