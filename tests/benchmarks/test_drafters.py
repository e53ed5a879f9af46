"""Recorded answers are played as they are, by what steps take, with drafters apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.drafters import Answer, Curve, play, read_answers

# up to four rows cost what one does
FLAT = Curve("1:4,4:4,5:5,6:6")
# what the answer says again, and what it says for the first time
COPY = Answer((1, *range(100, 160), 2), tuple(range(100, 150)))
FRESH = Answer((1, 2, 3), tuple(range(200, 240)))


def test_a_curve_is_straight_between_its_points_and_beyond() -> None:
    assert FLAT(1) == FLAT(3) == 0.004
    assert FLAT(5) == 0.005 and FLAT(8) == pytest.approx(0.008)
    for wrong in ("1:4", "2:4,1:5", "1:1,1:2"):
        with pytest.raises(ValueError, match="numbers of rows that rise"):
            Curve(wrong)


def test_without_guesses_a_token_takes_a_step() -> None:
    count = play([FRESH], "off", curve=FLAT, host=0.0)
    assert (count.tokens, count.steps, count.verified) == (40, 40, {})
    # the prompt's three rows cost what one does
    assert count.seconds == pytest.approx(40 * 0.004)


def test_a_copy_takes_fewer_steps_and_what_is_fresh_does_not() -> None:
    off, auto = (play([COPY], name, curve=FLAT) for name in ("off", "auto"))
    assert auto.tokens == off.tokens == 50
    # four rows are free
    assert auto.steps < off.steps / 3 and auto.seconds < off.seconds / 2
    assert auto.right["ngram"] > 35
    fresh = play([FRESH], "auto", curve=FLAT)
    assert fresh.steps == 40 and sum(fresh.right.values()) == 0


def test_who_knows_which_are_right_wastes_none() -> None:
    # the copy leaves tokens out
    edited = Answer(COPY.prompt, tuple(t for t in COPY.output if t % 7))
    auto, known = (play([edited, COPY], name, curve=FLAT) for name in ("auto", "known"))
    assert sum(known.verified.values()) == sum(known.right.values())
    assert sum(auto.verified.values()) > sum(auto.right.values())
    assert known.seconds <= auto.seconds
    # exactly the same every time
    assert play([edited, COPY], "auto", curve=FLAT) == auto


def test_several_at_once_share_steps() -> None:
    alone = play([FRESH] * 4, "off", curve=FLAT)
    together = play([FRESH] * 4, "off", curve=FLAT, streams=4)
    assert together.tokens == alone.tokens
    assert together.steps < alone.steps / 3


def test_answers_are_read_by_group(tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({"a": [{"prompt": [1], "output": [2, 3]}]}))
    assert read_answers(file) == {"a": [Answer((1,), (2, 3))]}
