"""Parts of the benchmark of speculation that need no model."""

from __future__ import annotations

import pytest

from benchmarks.speculation import __main__ as speculation
from benchmarks.speculation import steps
from benchmarks.speculation.__main__ import chosen_parts
from benchmarks.speculation.asked import SPECULATION
from benchmarks.speculation.steps import step_cost, texts_of
from benchmarks.speculation.targets import goodput_ratio

GROUPS = {"code_edit": ["a"], "open_chat": ["b"]}


def test_parts_are_chosen_with_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "TURNS", 3)
    monkeypatch.setenv("PARTS", "open_chat:40,goodput:2,steps")
    assert chosen_parts(GROUPS) == {"open_chat": 40, "goodput": 2, "steps": 3}
    monkeypatch.setenv("PARTS", "single:5")
    assert chosen_parts(GROUPS) == {"code_edit": 5, "open_chat": 5}
    monkeypatch.setenv("PARTS", "")
    assert set(chosen_parts(GROUPS)) == {*GROUPS, *speculation.PARTS}
    for wrong in ("tea", "goodput:few"):
        monkeypatch.setenv("PARTS", wrong)
        with pytest.raises(SystemExit, match=rf"'{wrong}' is none of single, code_edit"):
            chosen_parts(GROUPS)


def test_an_interval_over_requests() -> None:
    same = goodput_ratio([True, False] * 40, [True, False] * 40)
    assert (same["off"], same["on"], same["of"]) == (40, 40, 80)
    assert same["ratio"] == same["low"] == same["high"] == 1.0
    # one in ten of those that met their targets does not any more
    fewer = goodput_ratio([True] * 100, [True] * 90 + [False] * 10)
    assert fewer["ratio"] == 0.9
    assert 0.82 < fewer["low"] < 0.88 < 0.92 < fewer["high"] < 0.98


@pytest.mark.parametrize("kind", steps.KINDS)
def test_the_scheduler_s_cost_of_texts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEPS", 20)
    texts = texts_of(kind, 3, 2_000, 0)
    assert [len(text) for text in texts] == [2_000] * 3
    tokens = [token for text in texts for token in text]
    assert (len(set(tokens)) == len(tokens)) is (kind == "distinct")
    assert 0.0 < step_cost(SPECULATION, texts) < 1.0
    # the same work each time, and more of it with guesses
    calls = [step_cost(SPECULATION, texts, calls=True) for _ in range(2)]
    # a few calls of what Python keeps from run to run
    assert calls[0] == pytest.approx(calls[1], abs=1.0)
    assert calls[1] > step_cost({"method": "off"}, texts, calls=True) > 20
