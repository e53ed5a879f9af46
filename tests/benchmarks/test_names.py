"""What ``make bench`` and its earlier targets answer about names."""

from __future__ import annotations

import sys

import pytest

from benchmarks.__main__ import PARTS_OF, benchmarks, main
from benchmarks.promises.__main__ import PARTS


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bench-peers", "make bench-peers is now make bench NAME=peers"),
        ("bench-gaps", "gaps is part of NAME=promises"),
        ("neighbours", "neighbours is part of NAME=promises"),
        ("bench-pers", "there is no benchmark 'pers'"),
        ("pers", "there is no benchmark 'pers'"),
    ],
)
def test_a_name_that_is_not_run(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", name])
    assert main() == 2
    told = capsys.readouterr()
    assert said in told.err
    assert all(known in told.out for known in benchmarks()) is ("no benchmark" in said)


def test_parts_are_those_of_promises() -> None:
    assert tuple(PARTS_OF) == PARTS
