"""Levels computed in turns: the order, the figures and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import turns
from benchmarks.kernels.turns import ratios, take_turns
from paceline.backends.native import unavailable_reason, variants


def test_works_take_turns_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0
    costs = {"a": iter((9.0, 1.0, 1.0, 4.0)), "b": iter((9.0, 2.0, 3.0, 8.0))}
    order: list[str] = []
    monkeypatch.setattr("benchmarks.kernels.turns.time.process_time", lambda: clock)

    def work(name: str) -> None:
        nonlocal clock
        order.append(name)
        clock += next(costs[name])

    times = take_turns({"a": lambda: work("a"), "b": lambda: work("b")}, 3)
    assert order == ["a", "b"] * 4
    assert times == {"a": [1.0, 1.0, 4.0], "b": [2.0, 3.0, 8.0]}
    # of the rounds 2, 3 and 2: a busy moment costs both
    assert ratios(times) == {"b": 2.0}


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_levels_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "SHAPES", ((64, 64),))
    monkeypatch.setattr(turns, "ROWS", (2,))
    monkeypatch.setattr(turns, "ROUNDS", 1)
    monkeypatch.setattr(turns, "COPIES_MB", 0.01)
    monkeypatch.setattr(turns, "machine", lambda: {"cpu": "x", "load": 0.5})
    monkeypatch.setenv("PARTS", "products")
    level = variants()[-1]
    # with itself: what differs is the machine's noise
    assert turns.main([level]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["levels"] == [level] and answer["machine"]["cpu"] == "x"
    assert set(answer["products"]) == {"int8 64 x 64 M=2", "q4 64 x 64 M=2"}
    assert all(found[level]["gmac_s"] > 0 for found in answer["products"].values())
    monkeypatch.setenv("PARTS", "sampling")
    with pytest.raises(SystemExit, match="2"):
        turns.main([level])
    assert "products, steps" in capsys.readouterr().err


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_a_level_that_does_not_run_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "ISAS", [variants()[0], "avx10"])
    assert kernels.main() == 2
    assert f"ISA: avx10 not among {', '.join(variants())}" in capsys.readouterr().err
