"""A refactoring of core must decide exactly as before.

A change that means to decide otherwise records the cases again and says why:

    python -m tests.replay.cases
"""

from __future__ import annotations

import pytest

from tests.replay.cases import CASES, GOLDEN, decisions, recorded
from tests.replay.difference import first_difference


@pytest.mark.parametrize("name", sorted(CASES))
def test_decisions_are_those_recorded(name: str) -> None:
    found = first_difference(recorded(name), decisions(CASES[name]))
    assert found is None, (
        f"decisions of {name} changed: intended? then run python -m tests.replay.cases\n{found}"
    )


def test_every_recording_has_a_case() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.txt.gz" for name in CASES}
