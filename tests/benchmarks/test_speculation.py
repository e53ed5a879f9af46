"""Parts of bench-speculation that need no model."""

from __future__ import annotations

import pytest

from benchmarks import speculation
from benchmarks.speculation import SPECULATION, _chosen, _goodput_ratio, _step_seconds, _texts

GROUPS = {"code_edit": ["a"], "open_chat": ["b"]}


def test_parts_are_chosen_with_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "TURNS", 3)
    monkeypatch.setenv("PARTS", "open_chat:40,goodput:2,steps")
    assert _chosen(GROUPS) == {"open_chat": 40, "goodput": 2, "steps": 3}
    monkeypatch.setenv("PARTS", "single:5")
    assert _chosen(GROUPS) == {"code_edit": 5, "open_chat": 5}
    monkeypatch.setenv("PARTS", "")
    assert set(_chosen(GROUPS)) == {*GROUPS, *speculation.PARTS}
    for wrong in ("tea", "goodput:few"):
        monkeypatch.setenv("PARTS", wrong)
        with pytest.raises(SystemExit, match=rf"'{wrong}' is none of single, code_edit"):
            _chosen(GROUPS)


def test_an_interval_over_requests() -> None:
    same = _goodput_ratio([True, False] * 40, [True, False] * 40)
    assert (same["off"], same["on"], same["of"]) == (40, 40, 80)
    assert same["ratio"] == same["low"] == same["high"] == 1.0
    # one in ten of those that met their targets does not any more
    fewer = _goodput_ratio([True] * 100, [True] * 90 + [False] * 10)
    assert fewer["ratio"] == 0.9
    assert 0.82 < fewer["low"] < 0.88 < 0.92 < fewer["high"] < 0.98


@pytest.mark.parametrize("kind", ["distinct", "words"])
def test_texts_that_hardly_repeat_themselves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "STEPS", 20)
    texts = _texts(kind, 3, 400, 0)
    assert [len(text) for text in texts] == [400] * 3
    tokens = [token for text in texts for token in text]
    assert (len(set(tokens)) == len(tokens)) is (kind == "distinct")
    assert 0.0 < _step_seconds(SPECULATION, texts) < 1.0
