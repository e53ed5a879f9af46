"""A refactoring of core must decide exactly as before.

A change that means to decide otherwise records the cases again and says why:

    python -m tests.replay.cases
"""

from __future__ import annotations

import re

import pytest

from tests.replay.cases import CASES, GOLDEN, decisions, recorded
from tests.replay.difference import first_difference


@pytest.mark.parametrize("name", sorted(CASES))
def test_decisions_are_those_recorded(name: str) -> None:
    found = first_difference(recorded(name), decisions(CASES[name]))
    assert found is None, (
        f"decisions of {name} changed: intended? then run python -m tests.replay.cases\n{found}"
    )


@pytest.mark.parametrize(
    "shown",
    [
        "cannot be computed",
        "reason 'queue-full'",
        "reason 'queue-share'",
        "reason 'predicted-wait'",
        "reason 'pressure'",
        "reason 'expired'",
        "pressure=3",
        r"tier (r\d+) promised(.|\n)*tier \1 relegated(.|\n)*tier \1 promised",
        r"tier r\d+ background promoted",
        "tier .* favoured",
        "swap .* out",
        "swap .* in",
        "copy ",
        "held='pace'",
        "held='policy'",
        "wake=[0-9]",
        "guesses .* ngram",
        "guesses .* prediction",
        "guessed-right-prediction=[0-9]",
    ],
)
def test_recordings_show_what_is_rare(shown: str) -> None:
    """A case that no longer makes happen what it was written for guards nothing."""
    assert any(re.search(shown, "\n".join(recorded(name))) for name in CASES), shown


def test_every_recording_has_a_case() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.txt.gz" for name in CASES}
