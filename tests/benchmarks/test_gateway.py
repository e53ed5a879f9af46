"""What the gateway's benchmark takes, and the parts of it that are arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.gateway.live_routing as live
import benchmarks.gateway.options as gateway_options
from benchmarks.common.client import Timing
from benchmarks.common.processes import Unavailable
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.gateway import __main__ as command
from benchmarks.gateway.__main__ import main
from benchmarks.gateway.calls import calls_per_chunk
from benchmarks.gateway.failover import Seen, _count, _pause, _pauses
from benchmarks.gateway.live_routing import (
    DTYPES,
    POLICIES,
    Asked,
    Chooser,
    Measured,
    Outstanding,
    Targets,
    _chooser,
    _endless,
    _measure,
    headline,
    mark,
    plan,
    ratios,
)
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
            "live_routing, failover, got 'speed'",
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
    unhurt = Seen(ids={0: [1, 2, 3]}, ends={0: "stop"}, done=True)
    for seen in (
        Seen(ids={0: [1, 2, 3]}, ends={0: "stop"}, done=True, resumed=True),
        Seen(ids={0: [1, 2]}, error="lost"),
        Seen(ids={0: [1, 2, 3, 3]}, ends={0: "stop"}, done=True),
    ):
        _count(row, seen, unhurt)
    assert [row[name] for name in names] == [0, 3, 1, 1, 1, 1]
    # the longest gap that ends after the fault
    assert _pause(Seen(times=[0.0, 5.0, 5.1, 5.4]), at=5.05) == pytest.approx(0.3)
    assert _pauses([]) == {}
    assert _pauses([1.0, 3.0]) == {"pause_p50_s": 2.0, "pause_p99_s": 2.98}


def test_routers_are_left_out_where_nobody_asks_or_they_do_not_install(
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


def test_a_turn_is_the_same_for_every_policy() -> None:
    for load in ("mixed", "shared"):
        marks = [mark(who, 3) for who in range(2)]
        one, two = (plan(load, 20.0, 5.0, 3, begins) for begins in marks)
        assert len(one) > 50 and all(0.0 < each.at < 5.0 for each in one)
        for mine, theirs in zip(one, two, strict=True):
            assert (mine.at, mine.output, mine.tight) == (theirs.at, theirs.output, theirs.tight)
            assert mine.text.removeprefix(marks[0]) == theirs.text.removeprefix(marks[1])
            assert len(mine.text) == len(theirs.text) and mine.output > 0
            assert mine.text != theirs.text and len(mine.pieces) == len(theirs.pieces)
        assert one != plan(load, 20.0, 5.0, 4, marks[0])
    assert len({len(mark(who, turn)) for who in (0, 99) for turn in (0, 999)}) == 1
    with pytest.raises(ValueError, match="got 0 and 1000"):
        mark(0, 1000)
    first = [each.pieces[:2] for each in plan("shared", 20.0, 5.0, 3, "x")]
    assert len(set(first)) <= 8 and len(first) > 50
    assert len({each.pieces for each in plan("mixed", 20.0, 5.0, 3, "x") if each.pieces}) > 40


def test_what_is_outstanding_is_given_back() -> None:
    seen = Outstanding()
    amount = seen.add(1, Asked(0.0, "x" * 400, 9, True))
    assert seen.tokens == [0.0, amount, 0.0] and amount == 116.0
    seen.end(1, amount, 30)
    assert seen.tokens == [0.0, 0.0, 0.0]
    assert seen.add(0, Asked(0.0, "x" * 400, 9, True)) == 130.0


def test_ratios_are_of_the_best_other() -> None:
    goodput = {
        "gateway": [0.8, 0.9, 1.0], "round-robin": [0.4, 0.45, 0.5],
        "least-outstanding": [0.8, 0.9, 1.0], "prefix-affinity": [0.0, 0.0, 0.0],
    }  # fmt: skip
    told = ratios(goodput)
    assert told["best_other"] == "least-outstanding"
    assert told["vs_round_robin"] == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert told["vs_best_other"]["ratio"] == 1.0
    # one statistic: the ratio lies in its interval, where single turns are 0, too
    uneven = ratios(goodput | {"gateway": [0.0, 0.9, 1.0], "round-robin": [0.0, 0.1, 0.9]})
    row = uneven["vs_round_robin"]
    assert row["ratio"] == 1.9 and row["low"] <= 1.9 <= row["high"] <= 9.0
    nothing = ratios({name: [0.0] for name in POLICIES})
    assert nothing["vs_round_robin"] == {"ratio": None, "low": None, "high": None}


def test_the_headline_is_the_worst_load_with_its_interval() -> None:
    def row(ratio: float | None) -> dict[str, dict[str, float | None]]:
        known = ratio is not None
        found = {"ratio": ratio, "low": 0.9 if known else None, "high": 3.0 if known else None}
        return {"vs_round_robin": found, "vs_best_other": found}

    told = headline({"mixed": row(1.5), "shared": row(1.2)})["vs_round_robin"]
    assert told == {"ratio": 1.2, "low": 0.9, "high": 3.0, "load": "shared", "undefined": []}
    told = headline({"mixed": row(1.5), "shared": row(None)})["vs_best_other"]
    assert (told["ratio"], told["load"], told["undefined"]) == (1.5, "mixed", ["shared"])
    told = headline({"mixed": row(None)})["vs_best_other"]
    assert told["ratio"] is None and told["undefined"] == ["mixed"]


def test_other_policies_begin_with_what_was_measured_and_keep_it() -> None:
    prompts = [Asked(0.0, letter * 400, 8, True) for letter in "abc"]
    targets = Targets((1.0, 1.0), (1.0, 1.0))
    ended = [(2, prompts[0], 30), (1, prompts[1], 30)]
    measured = Measured(dict.fromkeys(DTYPES, 1.0), targets, ended)
    assert measured.mean_prompt_tokens == 100.0 and _chooser("gateway", measured) is None
    least = _chooser("least-outstanding", measured)
    assert isinstance(least, Chooser)
    # outputs were 30 on average, not the 16 of one that knows nothing
    assert least.begin(prompts[0]) == (0, 130.0)
    least.end(0, 130.0, 30)
    assert least.begin(prompts[1]) == (0, 130.0) and least.begin(prompts[2]) == (1, 130.0)
    affine = _chooser("prefix-affinity", measured)
    assert affine is not None
    # where it was measured, until that engine has more than three mean prompts outstanding
    assert [affine.begin(prompts[0])[0] for _ in range(4)] == [2, 2, 2, 0]


def test_an_engine_is_measured_by_what_ended_within_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    sent = itertools.count()

    async def send(port: int, model: str, asked: Asked, slo: object) -> Timing:
        nonlocal now
        # each of twelve callers ends one request within a second, and one after it
        end = 0.6 * (1 + next(sent) // 12)
        await asyncio.sleep(0)
        now = end
        return Timing(end - 0.6, (end - 0.35, end), asked.output)

    monkeypatch.setattr(live, "_send", send)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now))
    found = asyncio.run(_measure(0, "mixed", 1.0))
    assert found.rates == {"int8": 4.0, "q4": 4.0, "bfloat16": 4.0}
    assert len(found.ended) == 24 and found.targets.tight[0] == pytest.approx(0.125)
    # on a machine that is too slow for the time, it is as long as the slowest engine takes
    now, sent = 0.0, itertools.count()
    slow = asyncio.run(_measure(0, "mixed", 0.1))
    assert slow.rates == pytest.approx(dict.fromkeys(DTYPES, 4 / 0.6))

    async def fails(*asked: object) -> Timing:
        return Timing(0.0, (), 0, "not done within 60 s")

    monkeypatch.setattr(live, "_send", fails)
    with pytest.raises(Unavailable, match="a request at int8 failed: not done within 60 s"):
        asyncio.run(_measure(0, "mixed", 1.0))


@pytest.mark.thorough
def test_what_is_not_measured_is_said_and_the_rest_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that does not bear a load, and a fault of the benchmark itself."""
    monkeypatch.setenv("PARTS", "live_routing,failover,routing")
    monkeypatch.setenv("QUICK", "1")

    class Started(contextlib.AbstractContextManager[Any]):
        port = 0

        def __exit__(self, *raised: object) -> None: ...

    async def load(port: int, load: str, *length: object) -> dict[str, Any]:
        if load == "mixed":
            raise Unavailable("int8 takes too long")
        one = {"ratio": 1.0, "low": 1.0, "high": 1.0}
        return {"vs_round_robin": one, "vs_best_other": one}

    def broken(*asked: object) -> dict[str, Any]:
        raise KeyError("streams")

    monkeypatch.setattr(live, "_engine", lambda *asked: Started())
    monkeypatch.setattr(live, "_gateway", lambda *asked: Started())
    monkeypatch.setattr(live, "_load", load)
    monkeypatch.setattr(command, "failover", broken)
    monkeypatch.setattr(command, "routing", lambda *asked: {"vs_round_robin": 2.0})
    assert main() == 1, "a fault is not a slow machine"
    out, err = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])
    assert told["unmeasured"] == {
        "live routing, mixed": "int8 takes too long",
        "failover, null": "KeyError: 'streams'",
        "failover": "none of its servers was measured",
    }
    assert told["results"]["routing"]["vs_round_robin"] == 2.0
    assert list(told["results"]["routing"]["live"]["rows"]) == ["shared"]
    assert "  live routing, mixed was not measured: int8 takes too long" in err
    assert "Traceback" in err and set(told["seconds"]) == {"live_routing", "failover", "routing"}


def test_a_plan_that_is_over_begins_again_in_no_cache() -> None:
    first = plan("shared", 1.0, 60.0, 1000, mark(4, 0))
    both = list(itertools.islice(_endless("shared", 1000, 4), 2 * len(first)))
    assert both[: len(first)] == first
    for one, two in zip(first, both[len(first) :], strict=True):
        assert one.text.removeprefix(mark(4, 0)) == two.text.removeprefix(mark(4, 1))
        assert one.text != two.text and one.output == two.output


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
