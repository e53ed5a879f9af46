"""Ranges of settings: what lies in them, and what is said of what does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated

import pytest

from paceline.ranges import Range, outside, ranges_of


@pytest.mark.parametrize(
    ("allowed", "inside", "beyond", "words"),
    [
        (Range(1), (1, 1e9, None), (0, 0.99), "at least 1"),
        (Range(0, above=True), (0.1, None), (0, -1), "above 0"),
        (Range(0, 1), (0, 0.5, 1), (-0.1, 1.1), "in [0, 1]"),
        (Range(0, 1, above=True), (0.1, 1), (0, 1.1), "in (0, 1]"),
        (Range(0, 1, below=True), (0, 0.9), (1, -1), "in [0, 1)"),
    ],
)
def test_ends_are_in_the_range_unless_it_says_otherwise(
    allowed: Range,
    inside: tuple[float | None, ...],
    beyond: tuple[float, ...],
    words: str,
) -> None:
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in beyond)
    assert str(allowed) == words


def test_each_setting_out_of_range_is_named_with_its_value() -> None:
    ranges = {"a": Range(1), "b": Range(0, 1), "c": Range(0, 9, too_low="positive; off is None")}
    values = SimpleNamespace(a=0, b=0.5, c=-1)
    assert list(outside(values, ranges)) == [
        ("a", "a must be at least 1, got 0"),
        ("c", "c must be positive; off is None, got -1"),
    ]
    values.a, values.c = None, 10
    assert [message for _, message in outside(values, ranges)] == ["c must be in [0, 9], got 10"]


class Settings:
    a: Annotated[int | None, "a number", Range(1)] = None
    b: Annotated[float, Range(0, 1)] = 0.5
    c: Annotated[str, "no range"] = ""
    d: int = 7


def test_ranges_are_those_of_the_annotations() -> None:
    assert ranges_of(Settings) == {"a": Range(1), "b": Range(0, 1)}
