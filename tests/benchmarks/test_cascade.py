"""Tasks of ``make bench NAME=cascade``, and figures of made-up answers."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from benchmarks.cascade.collect import labels
from benchmarks.cascade.judging import by_kind, by_pair, pair, router_us, scripted_large
from benchmarks.cascade.overload import overload
from benchmarks.cascade.tasks import HELD_OUT, KINDS, make_labels, truth
from paceline.bench.calibrate.asking import Answers
from paceline.bench.calibrate.checkers import quality


def test_tasks_are_many_and_each_checker_knows_its_answer_alone() -> None:
    usual, held = labels()
    assert (len(usual), len(held)) == (500, 90) and len(KINDS) - len(HELD_OUT) >= 12
    assert {label.kind for label in held} == set(HELD_OUT)
    assert not {label.kind for label in usual} & set(HELD_OUT)
    assert len({label.digest for label in (*usual, *held)}) == 590
    assert all(quality(label, truth(label)) for label in (*usual, *held))
    for kind in KINDS:
        of_kind = [label for label in (*usual, *held) if label.kind == kind]
        wrong = [
            quality(one, truth(other))
            for one in of_kind
            for other in of_kind
            if truth(one).casefold() != truth(other).casefold()
        ]
        assert wrong and not any(wrong), kind
        assert not any(quality(label, "I do not know.") for label in of_kind), kind


def test_tasks_come_from_their_seed() -> None:
    kinds = tuple(KINDS)
    assert make_labels(40, kinds, 3) == make_labels(40, kinds, 3) != make_labels(40, kinds, 4)
    for label in make_labels(40, kinds, 3):
        assert len(label.messages) == 5 and re.compile(label.check.regex or "")


@pytest.mark.slow
def test_figures_of_made_up_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the figures are of any scorer, and a linear one is fitted in a hundredth of the time
    monkeypatch.setattr("paceline.bench.calibrate.fitting.has_forests", lambda: False)
    usual, _ = labels()
    answers, draw = Answers(tmp_path / "answers"), random.Random(0)
    for label in usual[:200]:
        good = draw.random() < (0.9 if label.kind in ("sums", "copying", "json") else 0.2)
        message = {"role": "assistant", "content": truth(label) if good else "so it is"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answers.add("small", label, {"choices": [choice]})
    rows = pair(usual[:200], answers, scripted_large(usual[:200]))
    found = by_kind(rows)
    assert found["sums"][0] > 0.6 > found["sorting"][0] and found["sums"][1] > 0.8
    assert 0.0 < router_us(rows) < 20_000.0
    # a weaker large model is closer, and a judge of the small answers alone gets further
    pairs = by_pair(rows[:60], "other")
    assert next(iter(pairs)) == "other"
    # the answers that these rows have already
    assert pairs.pop("other") == pairs["scripted, worst of 1"]
    gaps = [each["difference"] for each in pairs.values()]
    assert len(gaps) == 3 and gaps == sorted(gaps, reverse=True)
    known = [each["apgr"]["small known"][0] for each in pairs.values()]
    assert known == sorted(known) and known[0] > 0.5
    for each in pairs.values():
        areas = each["apgr"]
        above = (areas["cascade"][0] - 0.5) / (areas["small known"][0] - 0.5)
        assert each["share_of_known"]["cascade"][0] == pytest.approx(above, abs=0.02)
        assert areas["oracle"][0] >= max(areas["small known"][0], areas["cascade"][0])
        assert areas["random"][1] <= 0.5 <= areas["random"][2]
    told = overload(rows, seconds=20.0, splits=2)
    assert told["load-aware"]["attainment"] > told["large alone"]["attainment"]
    assert told["large alone"]["stays_small"] == 0.0
