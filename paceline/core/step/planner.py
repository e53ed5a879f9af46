"""Filling of a step in passes: rows for running requests, then admissions, tier by tier.

A plain step has one pass. The planner keeps nothing from one step to the next.

This module does not know how the passes are chosen, or how requests arrive and end.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Request, RequestStatus
from paceline.core.step.batch_admission import BatchAdmission
from paceline.core.step.limits import Pass, Step
from paceline.core.step.rows import Rows
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Planner"]


class Planner:
    """Fills steps with rows."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._waiting, self._running = state.waiting, state.running
        self._rows = Rows(state)
        self._admission = BatchAdmission(state, self._rows)

    def fill(self, step: Step, *, held: bool) -> Reason | None:
        """Plan rows, and return why the head of the queue is blocked; None if it is not. ``held``:
        the policy admits no request for now."""
        mixes = self._state.policy.mixes
        if not mixes:
            self._choose_kind(step, held)
        if step.evicted is not None:
            self._running.preempt(step.evicted, step.now)
        blocked_by = Reason.POLICY if held or not (step.wide or mixes) else None
        if not step.wide and blocked_by is None:
            blocked_by = Reason.BUDGET
        passes, num_preemptions = step.passes, self._running.num_preemptions
        for number in range(len(passes)):
            if self._running.num_preemptions > num_preemptions:
                num_preemptions = self._running.num_preemptions
                passes = [part._replace(running=_still_running(part.running)) for part in passes]
            blocked_by = self._run(step, passes[number:], blocked_by)
        if not step.rows and step.wide and not mixes:
            self._fill_narrow(step)
        for child in step.forked:
            self._waiting.enter(child, step.now)
        return blocked_by

    def _choose_kind(self, step: Step, held: bool) -> None:
        """Choose the kind of rows, for policies that do not mix: wide while any run or wait."""
        running = self._running.requests
        step.wide = any(request.num_uncomputed_tokens > 1 for request in running)
        if not step.wide and not held:
            head = self._waiting.first(pressing=step.pressing)
            step.wide = not running or (
                head is not None
                and len(running) < self._state.config.max_num_seqs
                and self._state.kv.shortfall(head, beside_others=True) == 0
            )

    def _fill_narrow(self, step: Step) -> None:
        """Fill the step with narrow rows after all: memory allowed no wide row."""
        step.wide = False
        ordinary = [r for r in self._running.requests if r.tier is Tier.ORDINARY]
        rest = [r for r in self._running.requests if r.best_effort]
        self._rows.extend(step, ordinary, len(rest), limited=False)
        self._rows.extend(step, _still_running(rest), 0, limited=True)

    def _run(self, step: Step, passes: Sequence[Pass], blocked_by: Reason | None) -> Reason | None:
        """Run the first of the remaining passes; if ``blocked_by`` is a reason, admit no request.
        Returns the reason afterwards."""
        part, is_first = passes[0], len(passes) == len(step.passes)
        later = sum(len(following.running) for following in passes[1:])
        reserved = later
        if is_first:
            later += step.kept
            reserved = later + len(part.must_run) + step.reserved
        preempted = self._rows.extend(step, part.running, reserved, limited=not is_first)
        if blocked_by is None and preempted and self._running.requests:
            blocked_by = Reason.MEMORY
        num_rows, preempted = len(step.rows), False
        if part.must_run and (must_run := _still_running(part.must_run)):
            before = step.shape
            # each takes one token, so none has to be kept for other rows
            preempted = self._rows.extend(step, must_run, 0, limited=False)
            step.lengthened(before)
        num_must_run = len(step.rows) - num_rows
        if blocked_by is None and len(self._waiting):
            step.budget -= later
            blocked_by = self._admission.admit_waiting(step, part.last)
            step.budget += later
        if blocked_by is None and preempted:
            blocked_by = Reason.MEMORY
        if is_first and len(passes) > 1:
            step.first_pass_done(num_must_run)
        return blocked_by


def _still_running(requests: Sequence[Request]) -> list[Request]:
    """Return the requests that were not preempted in this step."""
    running = RequestStatus.RUNNING
    return [request for request in requests if request.status is running]
