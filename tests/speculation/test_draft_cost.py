"""What drafts cost, and when one is tried that is predicted not to pay."""

from __future__ import annotations

import pytest

from paceline.core.outputs import StepResult
from paceline.core.predict.step_time import StepTimeModel
from paceline.speculation.draft_cost import MANY, DraftCosts, Tries


def tried_at(tries: Tries, steps: int, *, paid: bool) -> list[int]:
    """Return the steps that were due for a try; each such step gets drafts."""
    found = []
    for step in range(1, steps + 1):
        if tries.begin_step():
            found.append(step)
            tries.note(not paid)
            tries.end_step()
    return found


def test_a_try_that_does_not_pay_doubles_the_interval() -> None:
    assert tried_at(Tries(), 300, paid=False) == [32, 96, 224]
    assert tried_at(Tries(), 100, paid=True) == [32, 64, 96]


def test_another_request_brings_the_next_try_closer() -> None:
    tries = Tries()
    tried_at(tries, 96, paid=False)
    tries.on_request()
    assert tried_at(tries, 64, paid=True) == [32, 64]


def test_passes_and_known_tokens_are_priced_apart() -> None:
    costs = DraftCosts(StepTimeModel())
    made = ((0, (1, 2)), (1, (3,)))
    costs.note_drafted(StepResult(0, (), made=made, drafting=0.2), verified=True, tried=False)
    assert costs.pass_seconds == pytest.approx(0.1)
    reads = StepResult(1, (), made=made, caught_up=(MANY, 0), drafting=0.2 + 0.32)
    costs.note_drafted(reads, verified=True, tried=False)
    assert costs.token_seconds == pytest.approx(0.01)
    # no more tokens are read than in any step so far
    assert costs.making(1, 2 * MANY) == pytest.approx(0.1 + 0.32)
    assert costs.making(0, 1) == pytest.approx(0.01)


def test_a_head_reads_no_more_than_it_did_before() -> None:
    costs = DraftCosts(StepTimeModel())
    assert costs.unseen(500) == 500
    costs.note_skipped(MANY - 1, 100)
    assert costs.unseen(500) == 500
    costs.note_skipped(MANY, 100)
    assert (costs.unseen(500), costs.unseen(7)) == (100, 7)


def test_the_bubble_fades_where_no_plan_waited() -> None:
    costs = DraftCosts(StepTimeModel())
    # longer than two steps of unknown length: there was no request
    costs.note_result(1.0, 1, 0.0)
    costs.note_plan(1.5, 1, waited=True)
    assert costs.bubble == 0.0
    for rows in (1, 2, 3) * 6:
        costs.note_result(1.0, rows, 0.02)
    costs.note_plan(1.01, 1, waited=True)
    assert costs.bubble == pytest.approx(0.001)
    costs.note_plan(2.0, 1, waited=False)
    assert costs.bubble == pytest.approx(0.00099)
