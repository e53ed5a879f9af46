"""The core of the commit that ``BASE`` names and this one decide the same: a sample of the
scenarios that ``make replay`` plays all of.

A change that means to decide otherwise moves ``BASE`` to its own commit and records the cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.policies import POLICIES
from paceline.core.scheduler import Scheduler
from paceline.speculation import draft_choice
from tests.replay import base as bases
from tests.replay.base import NoBaseError, named_base, unpack_core
from tests.replay.observe import Core
from tests.replay.scenarios import play
from tests.replay.side_by_side import compare


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Core:
    try:
        return unpack_core(named_base(), tmp_path_factory.mktemp("base"))
    except NoBaseError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 20), marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_decisions_are_those_of_the_base(base: Core, policy: str, seeds: range) -> None:
    for seed in seeds:
        played = compare(base, (policy, seed))
        assert played.difference is None, (
            f"{policy}, seed {seed}, against {named_base()[:12]}: intended? then write the hash of "
            f"the commit that changed it to tests/replay/BASE\n{played.difference}"
        )


def test_a_difference_is_told_by_its_step(base: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that believes it to be later from its thirtieth plan on."""
    schedule = Scheduler.schedule
    calls = []

    def late(self: Scheduler, now: float) -> object:
        calls.append(now)
        return schedule(self, now if len(calls) < 30 else now + 2.5)

    monkeypatch.setattr(Scheduler, "schedule", late)
    told = compare(base, ("fcfs", 2)).difference
    assert told is not None and "differs, at plan 30 of the run" in told
    assert "--- base" in told and "--- working tree" in told


def test_what_drafts_is_compared_too(base: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the base and of the working tree each has its own."""
    monkeypatch.setattr(draft_choice, "_LIKELY", 2.0)
    told = compare(base, ("fcfs", 14)).difference
    assert told is not None and ">     guesses " in told


def test_a_mistake_of_both_is_told_too(base: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(core: Core, policy: str, seed: int) -> list[str]:
        raise AssertionError("a block is lost")

    monkeypatch.setattr("tests.replay.side_by_side.play", fail)
    told = compare(base, ("fcfs", 1)).difference
    assert told is not None and told.endswith("raised AssertionError: a block is lost")


def test_a_scenario_is_the_same_each_time() -> None:
    assert play(Core(), "deadline", 4) == play(Core(), "deadline", 4)
    assert play(Core(), "deadline", 4) != play(Core(), "deadline", 6)


def test_a_commit_that_is_not_here_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoBaseError, match=r"the core of 000000000000 cannot be had: .*000000"):
        unpack_core("0" * 40, tmp_path)


def test_a_source_archive_has_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "ROOT", tmp_path)
    with pytest.raises(NoBaseError, match="is no git checkout"):
        unpack_core(named_base(), tmp_path)
