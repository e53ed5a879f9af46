"""No test reaches far into what is private."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.private import Reach, reaches

TESTS = Path(__file__).parent
# levels that no test reaches through
FAR = 3
# uses of what lies two levels deep, over all tests; lower it when there are fewer
MOST_OF_TWO = 25


@cache
def all_reaches() -> dict[str, list[Reach]]:
    return {
        path.relative_to(TESTS).as_posix(): reaches(path.read_text())
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
    }


def test_none_goes_through_three_levels() -> None:
    found = all_reaches()
    assert len(found) > 300
    far = [
        f"{path}:{r.line} {r.text}" for path, own in found.items() for r in own if r.levels >= FAR
    ]
    assert not far, f"give the object a public view instead: {far}"


def test_few_go_through_two() -> None:
    found = all_reaches()
    two = [f"{path}:{r.line} {r.text}" for path, own in found.items() for r in own if r.levels == 2]
    assert len(two) <= MOST_OF_TWO, two


def test_what_is_counted() -> None:
    source = """
a._b._c._d
x = a._b
x._c._d
y, z = x._c, 1
y.public._d
y.public()._e
a._b().c._d
a._b[0]._c
self.__dict__._b
def f():
    w = y._d
    w._e
w._f
"""
    levels = {(r.line, r.text): r.levels for r in reaches(source)}
    assert levels[2, "a._b._c._d"] == 3
    assert levels[4, "x._c._d"] == 3, "by a name of its own"
    assert levels[6, "y.public._d"] == 3
    assert levels[7, "y.public()._e"] == 1, "what a public method answers is public"
    assert levels[8, "a._b().c._d"] == 2
    assert levels[9, "a._b[0]._c"] == 2
    assert levels[10, "self.__dict__._b"] == 1
    assert levels[13, "w._e"] == 4
    assert levels[14, "w._f"] == 1, "another function's name"
