"""Steps that ran otherwise than planned: counters follow what ran.

A backend that owns the memory, or knows of resources that scheduling does not (adapter slots, a
grammar that is still compiled), may leave rows out of a step, shorten them, or start them elsewhere
because it found another cached prefix. Counters moved when the step was planned, so they move
again. Block tables stay as they are: such a backend has its own.

This module does not know why a row came out otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.core.request import Request, RequestStatus
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState

__all__ = ["amend"]


def amend(
    state: SchedulerState,
    plan: SchedulerOutput,
    done: Mapping[str, range],
    preempted: Sequence[Request],
    now: float,
) -> SchedulerOutput:
    """Return the plan as it ran, see ``Scheduler.amend``."""
    assert not plan.drafts, "rows with draft tokens cannot be amended"
    ran = Step(state=state, now=now, budget=0, chunk_tokens=0, passes=(), reserved=0)
    for row, request in zip(plan.rows, state.steps.newest(plan), strict=True):
        positions = range(row.start, row.start + row.num_tokens)
        if request in preempted:
            positions = range(row.start, row.start)
        _rerun(ran, row, request, done.get(row.request_id, positions))
    state.steps.amend(ran.requests, ran.shape)
    for request in preempted:
        if request.status is RequestStatus.RUNNING:
            state.running.preempt(request, now)
    num_tokens = sum(row.num_tokens for row in ran.rows)
    return replace(plan, rows=tuple(ran.rows), num_tokens=num_tokens)


def _rerun(ran: Step, row: ScheduledRow, request: Request, positions: range) -> None:
    """Take a row back, and add what ran of it to ``ran``."""
    request.num_pending_tokens -= row.samples
    request.history.num_chunks -= row.num_tokens > 1
    request.num_computed_tokens = positions.start
    if positions:
        ran.add(request, len(positions), row.new_block_ids)
