"""What the gateway's benchmark takes, and the parts of it that are arithmetic."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import benchmarks.gateway.options as gateway_options
from benchmarks.common.processes import Unavailable
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.faults.callers import Seen
from benchmarks.gateway import __main__ as command
from benchmarks.gateway.__main__ import main
from benchmarks.gateway.calls import calls_per_chunk
from benchmarks.gateway.failover import _count, _pauses
from benchmarks.gateway.options import (
    PARTS,
    ROUTERS,
    Options,
    OptionsError,
    litellm_command,
    router_pythons,
)


def test_the_usual_run_is_the_whole() -> None:
    options = Options.read({})
    assert (options.parts, options.times, options.model_times) == (PARTS, 20, 5)
    assert options.litellm is None and options.minutes == 6.0 and not options.quick
    quick = Options.read({"QUICK": "1", "TIMES": ""})
    assert not options.routers
    assert (quick.times, quick.model_times, quick.pools) == (1, 0, (0, 0))


def test_what_is_asked_for() -> None:
    asked = {
        "PARTS": "failover, overhead",
        "TIMES": "3",
        "MODEL_TIMES": "0",
        "MINUTES": "2.5",
        "POOLS": "4,7",
        "LITELLM": sys.executable,
    }
    options = Options.read(asked)
    assert options.parts == ("failover", "overhead")
    assert (options.times, options.model_times, options.minutes) == (3, 0, 2.5)
    assert options.pools == (4, 7) and options.litellm == sys.executable
    assert Options.read({"POOLS": "4"}).pools == (4, 0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "PARTS",
            "overhead,speed",
            "routing, failover, got 'speed'",
        ),
        ("PARTS", ",", "got ''"),
        ("TIMES", "0", "TIMES must be a whole number of at least 1, got '0'"),
        ("TIMES", "many", "got 'many'"),
        ("MODEL_TIMES", "-1", "at least 0"),
        ("MINUTES", "inf", "a number of at least 1, got 'inf'"),
        ("POOLS", "3,x", "got 'x'"),
        ("ROUTERS", "sglang", "ROUTERS may be install, got 'sglang'"),
        ("LITELLM", "/no/such/litellm", "no such command. LITELLM=install sets"),
    ],
)
def test_what_is_not_understood_is_named(name: str, text: str, words: str) -> None:
    with pytest.raises(OptionsError, match=words.replace(".", r"\.")):
        Options.read({name: text})


def test_nothing_starts_where_an_option_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LITELLM", "/no/such/litellm")
    assert main() == 2
    told = capsys.readouterr()
    assert told.err.startswith("LITELLM=/no/such/litellm: there is no such command")
    assert not told.out and told.err.count("\n") == 1


def test_without_litellm_it_is_said_how_it_is_given(tmp_path: Path) -> None:
    command, why = litellm_command(None, tmp_path)
    assert command is None and "LITELLM=COMMAND" in why and not list(tmp_path.iterdir())
    assert litellm_command("/bin/litellm", tmp_path) == ("/bin/litellm", "")


def test_a_relayed_chunk_costs_few_calls() -> None:
    """From the engine's bytes to the caller's connection: five functions, and what they call."""
    found = calls_per_chunk()
    assert 5 <= found["middle"] <= 17
    assert found["middle"] <= found["mean"] <= 26


def test_a_fault_is_weighed_against_the_unhurt_stream() -> None:
    names = ("times", "streams", "lost_tokens", "doubled_tokens", "failed", "resumed")
    row = dict.fromkeys(names, 0)
    unhurt = Seen(ids={0: [1, 2, 3]}, ends={0: "stop"}, finished=True)
    for seen in (
        Seen(ids={0: [1, 2, 3]}, ends={0: "stop"}, finished=True, resumed=True),
        Seen(ids={0: [1, 2]}, message="lost"),
        Seen(ids={0: [1, 2, 3, 3]}, ends={0: "stop"}, finished=True),
    ):
        _count(row, seen, unhurt)
    assert [row[name] for name in names] == [0, 3, 1, 1, 1, 1]
    # the longest gap that ends after the fault
    assert Seen(times=[0.0, 5.0, 5.1, 5.4]).longest_gap(after=5.05) == pytest.approx(0.3)
    assert _pauses([]) == {}
    assert _pauses([1.0, 3.0]) == {"pause_p50_s": 2.0, "pause_p99_s": 2.98}


def test_routers_are_left_out_unless_requested_and_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, missing = router_pythons(Options.read({}).routers, tmp_path)
    assert not found and set(missing) == set(ROUTERS) and not any(tmp_path.iterdir())

    def make_venv(folder: Path, packages: Sequence[str]) -> Path:
        if packages[0].startswith("vllm"):
            raise Unavailable("no wheel for this machine")
        return folder / "python"

    monkeypatch.setattr(gateway_options, "make_venv", make_venv)
    found, missing = router_pythons(Options.read({"ROUTERS": "install"}).routers, tmp_path)
    assert found == {"sglang-router": tmp_path / "sglang-router" / "python"}
    assert missing == {"vllm-router": "no wheel for this machine"}


def test_what_is_not_measured_is_said_and_the_rest_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of the benchmark itself."""
    monkeypatch.setenv("PARTS", "failover,routing")
    monkeypatch.setenv("QUICK", "1")

    def broken(*asked: object) -> dict[str, Any]:
        raise KeyError("streams")

    monkeypatch.setattr(command, "failover", broken)
    monkeypatch.setattr(command, "routing", lambda *asked: {"vs_round_robin": 2.0})
    assert main() == 1, "a fault is not a slow machine"
    out, err = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])
    assert told["unmeasured"] == {
        "failover, null": "KeyError: 'streams'",
        "failover": "none of its servers was measured",
    }
    assert told["results"]["routing"]["vs_round_robin"] == 2.0
    assert "  failover was not measured: none of its servers was measured" in err
    assert "Traceback" in err and set(told["seconds"]) == {"failover", "routing"}


def test_failover_has_its_own_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left: list[float] = []

    def failover(*asked: object) -> dict[str, float]:
        until = asked[3]
        assert isinstance(until, float)
        left.append(until - now)
        return dict.fromkeys(("streams", "lost_tokens", "doubled_tokens", "failed"), 0)

    now = 1000.0
    monkeypatch.setattr(command, "failover", failover)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    command._failover(Options(minutes=6.0), tmp_path, Unmeasured())
    assert left == [120.0, 180.0, 360.0]
