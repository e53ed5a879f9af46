"""Hundreds of schemas, regular expressions and grammars: whatever ends by itself is valid."""

from __future__ import annotations

import random

import jsonschema
import pytest

from benchmarks.grammars.outputs import generate_all
from benchmarks.grammars.schemas import GRAMMARS, LEVELS, matches_schema, schema


@pytest.mark.parametrize("part", [6, pytest.param(1, marks=pytest.mark.thorough)])
def test_every_completed_output_is_valid(part: int) -> None:
    """Of all of them, or of a sixth."""
    tallies, preemptions = generate_all(
        schemas=252 // part, patterns=48 // part, grammars=24 // part
    )
    assert preemptions > 0 or part > 1
    assert len(tallies) == len(LEVELS) + 2
    for kind, tally in tallies.items():
        assert tally.failed == [] and tally.invalid == [], kind
    asked, completed = [
        sum(getattr(t, f) for t in tallies.values()) for f in ("asked", "completed")
    ]
    assert asked == 324 // part
    assert completed >= 0.9 * asked, f"{completed} of {asked} ended by themselves"


@pytest.mark.parametrize("level", LEVELS)
def test_schemas_are_schemas_and_the_judge_can_say_no(level: int) -> None:
    for seed in range(20):
        made = schema(random.Random(seed), level)
        jsonschema.Draft202012Validator.check_schema(made)
        assert not matches_schema("[", made)
        assert not matches_schema('{"nobody": "asked for this", "or": "that"}', made)


def test_grammars_are_judged() -> None:
    for case, (good, bad) in zip(
        GRAMMARS,
        [("1 + (2+3)*4", "1 + (2"), ('id = 5\nname = "ab"', "id = ab"), ("[[x]]", "[x"),
         ("bc, a.", "c.")],
        strict=True,
    ):  # fmt: skip
        assert case.holds(good), good
        assert not case.holds(bad), bad
