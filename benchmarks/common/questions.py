"""Everyday questions, and whether an answer to one loops.

The questions are the project's own, one a line of ``questions.txt``, and none is in the text that
``paceline quantize`` rounds by. Every second one is held back: settings, sampling defaults and
models are chosen by OPEN alone, and figures of HELD stand next to those of all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["HELD", "LOOP_TOKENS", "OPEN", "QUESTIONS", "Share", "loops", "share"]

QUESTIONS: Final = tuple(
    Path(__file__).with_name("questions.txt").read_text(encoding="utf-8").splitlines()
)
# may be looked at while something is chosen
OPEN: Final = QUESTIONS[::2]
# is not looked at while anything is chosen
HELD: Final = QUESTIONS[1::2]

# tokens of an answer that ``loops`` is asked about
LOOP_TOKENS: Final = 200
# words in a row, and how often the same ones make a loop
_WORDS: Final = 4
_TIMES: Final = 8
# standard deviations that 95 % of a normal distribution lie within
_DEVIATIONS: Final = 1.959964


class Share(NamedTuple):
    """A share of answers, and the interval that holds it at 95 % (Wilson)."""

    share: float
    low: float
    high: float


def loops(text: str) -> bool:
    """Return whether the same four words in a row stand in a text eight times or more. ``text`` is
    the first LOOP_TOKENS tokens of an answer, or all of a shorter one."""
    return max(Counter(_runs(text.split())).values(), default=0) >= _TIMES


def share(found: Iterable[bool]) -> Share:
    """Return how large a share is true. Raises ValueError for none."""
    every = list(found)
    if not every:
        raise ValueError("no answers")
    count, part = len(every), sum(every) / len(every)
    square = _DEVIATIONS**2 / count
    middle = (part + square / 2) / (1 + square)
    spread = math.sqrt(part * (1 - part) * square + square**2 / 4) / (1 + square)
    return Share(part, max(0.0, middle - spread), min(1.0, middle + spread))


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(islice(words, first, None) for first in range(_WORDS)), strict=False)
