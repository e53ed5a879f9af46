"""``paceline doctor``: true findings, and an exit code that scripts can go by."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from paceline.backends import native
from paceline.backends.machine import cpu
from paceline.cli.main import main
from paceline.cli.watch import doctor


def findings(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and state and text by name."""
    code = main(["doctor", "--json", *flags])
    said = json.loads(capsys.readouterr().out)
    found = {each["name"]: [each["state"], each["text"]] for each in said["findings"]}
    assert said["faults"] == sum(state == "fault" for state, _ in found.values())
    assert (code == 1) == (said["faults"] > 0)
    return code, found


def test_a_machine_that_runs_tests_is_well(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    code, found = findings(capsys)
    assert code == 0
    assert {"versions", "processor", "kernels", "torch", "gpu", "memory", "model"} <= set(found)
    name = "smollm2-135m"
    assert found["model"] == ["note", f"{name} is not downloaded yet: paceline pull {name}"]
    assert "uvicorn" in found["versions"][1]
    # nothing was made
    assert not list(tmp_path.iterdir())
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) + 1 and "a server can run here" in lines[-1]


@pytest.mark.parametrize("reason", [None, "the native library was not built"])
def test_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda: reason)
    monkeypatch.setattr(native, "variants", lambda: ("avx2", "portable"))
    _, found = findings(capsys)
    if reason is None:
        assert found["kernels"] == ["ok", "native, level avx2, also portable"]
    else:
        assert found["kernels"][0] == "note" and found["kernels"][1].startswith(reason)


def test_faults_are_told_and_end_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available_memory", lambda: 100 << 20)
    code, found = findings(capsys, "no/such/place.gguf")
    assert code == 1
    assert found["memory"][0] == "fault" and "100 MiB free" in found["memory"][1]
    assert found["model"][0] == "fault" and "no model" in found["model"][1]
    assert main(["doctor", "no/such/place.gguf"]) == 1
    assert capsys.readouterr().out.endswith("\n2 faults\n")


def test_what_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_PACKAGES", ("no-such-package",))
    code, found = findings(capsys)
    assert code == 1 and found["versions"][0] == "fault"
    assert found["service redis"] == [
        "note",
        "not installed; --rate-limit-storage needs it: pip install 'paceline[redis]'",
    ]
    assert found["torch"] == [
        "note",
        "not installed; --compute torch and GPUs need it: pip install 'paceline[torch]'",
    ]
    # then nothing computes
    monkeypatch.setattr("paceline.backends.native.unavailable_reason", lambda: "no library")
    _, found = findings(capsys)
    assert found["kernels"] == ["fault", "no library; or pip install 'paceline[torch]'"]


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8000))
            taken.listen()
        except OSError:
            # somebody else's, which is as good
            pass
        assert findings(capsys)[1]["sockets"] == [
            "note",
            "port 8000 is taken: --port gives another",
        ]
