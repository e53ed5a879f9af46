from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import paceline.quantize
from benchmarks.common.questions import HELD, OPEN, QUESTIONS, loops, share

# how alike the words of two questions may be, as a share of those of both; the capitals of two
# countries have five of seven
MOST_ALIKE = 0.72


def words(question: str) -> frozenset[str]:
    return frozenset(re.findall(r"[\w']+", question.lower()))


def alike(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


def test_no_two_questions_are_alike() -> None:
    assert len(QUESTIONS) == 200 and len(OPEN) == len(HELD) == 100
    assert set(OPEN) | set(HELD) == set(QUESTIONS)
    sets = [words(question) for question in QUESTIONS]
    for index, one in enumerate(sets):
        assert 2 <= len(QUESTIONS[index].split()) <= 20
        for other in range(index):
            assert alike(one, sets[other]) <= MOST_ALIKE, (QUESTIONS[index], QUESTIONS[other])


def test_the_calibration_text_asks_none_of_them() -> None:
    chat = Path(paceline.quantize.__file__).with_name("calibration") / "chat.jsonl"
    asked = [
        words(message["content"])
        for line in chat.read_text().splitlines()
        for message in json.loads(line)["messages"]
        if message["role"] == "user"
    ]
    assert len(asked) > 100
    for question in QUESTIONS:
        closest = max(alike(words(question), other) for other in asked)
        assert closest <= MOST_ALIKE, question


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("la France, " * 8, False),
        # "la France, la France," begins at every second word
        ("la France, " * 9, True),
        ("so it goes on and on " * 7, False),
        ("so it goes on and on " * 8, True),
        ("one two three " * 100, True),
        (" ".join(map(str, range(200))), False),
        ("and so on\nand on " * 8, True),
    ],
)
def test_loops(text: str, expected: bool) -> None:
    assert loops(text) is expected


def test_a_share_has_an_interval_around_it() -> None:
    # 23 of 200, by Wilson's formula
    found = share([True] * 23 + [False] * 177)
    assert found == pytest.approx((0.115, 0.0779, 0.1666), abs=1e-4)
    assert share([False] * 200).low == 0 and share([False] * 200).high == pytest.approx(
        0.0188, abs=1e-4
    )
    with pytest.raises(ValueError, match="no answers"):
        share([])
