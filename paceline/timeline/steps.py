"""Frames of plans and their results: a step with the same rows as the one before, a token each,
takes only its numbers.

This module does not know the viewers, or the cost of writing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.core.outputs import ScheduledRow, SchedulerOutput, StepNote
from paceline.core.request import RequestStatus
from paceline.timeline.codec import encode
from paceline.timeline.events import NO_LANE, Done, Event, Kind, Plan, State
from paceline.timeline.ladder import THIN
from paceline.timeline.lanes import Entry, Lanes

__all__ = ["Steps"]

# seconds that one frame covers at level 2
_BIN: Final = 0.01
_NO_REASON: Final = 255
# indices in a row
_ID: Final = 0
_WIDTH: Final = 2
# looked up once: a member of an enum takes longer to reach than a name of the module
_RUNNING: Final = RequestStatus.RUNNING
_CHUNKED, _DECODE = State.CHUNK, State.DECODE
# plain numbers, which are packed faster
_FOUND, _CHUNK, _DRAFT, _WRONG = map(int, (Kind.FOUND, Kind.CHUNK, Kind.DRAFT, Kind.WRONG))


class Steps:
    """Used from the engine's thread, in the order in which plans are made and results come in.

    Args:
        known: the requests that have not ended, by id.
    """

    def __init__(self, known: Mapping[str, Entry], lanes: Lanes) -> None:
        self._known = known
        self._lanes = lanes
        # steps whose plan was written and whose result was not: whether their rows were written
        self._open: dict[int, bool] = {}
        # at level 2: steps, tokens, rows and chunks to be added to the next PLAN
        self._merged = (0, 0, 0, 0)
        self._told_at = -math.inf

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote, level: int) -> bytes:
        """Return the PLAN, or b"" if the next one covers this step too."""
        rows, lanes, known = plan.rows, self._lanes, self._known
        num_rows = len(rows)
        events: list[Event] = []
        for request_id in plan.released:
            entry = known.get(request_id)
            # lanes of ended requests are free already
            if entry is not None and entry.lane != NO_LANE:
                lanes.preempt(entry, now, events)
        admitted: list[Entry] = []
        for new in plan.new_requests:
            entry = known.get(new.request_id)
            if entry is not None and entry.request.status is _RUNNING:
                if entry.lane == NO_LANE:
                    lanes.admit(entry, now, events)
                admitted.append(entry)
        if level == 2 and not events and now - self._told_at < _BIN:
            self._merge(plan)
            return b""
        thin = level == 2 or (level == 1 and plan.step_id % THIN != 0)
        wide: list[ScheduledRow] = []
        if plan.num_tokens > num_rows or lanes.odd or num_rows < lanes.num_running or admitted:
            wide = _wide(plan)
            if not thin:
                self._rows(plan, wide, events)
        if admitted:
            starts = {row[_ID]: row.start for row in wide}
            for entry in admitted:
                # a row of one token begins after all others of the request
                request = entry.request
                found = starts.get(request.request_id, request.num_computed_tokens - 1)
                if found:
                    events.append(Event(entry.lane, _FOUND, found))
        if lanes.demoted:
            lanes.restored(events)
        steps, tokens, narrow, _ = self._merged
        if steps:
            self._merged = (0, 0, 0, 0)
        self._told_at = now
        self._open[plan.step_id] = not thin
        return encode(
            Plan(
                plan.step_id,
                now,
                note.predicted_s,
                note.limit_s,
                note.budget,
                tokens + plan.num_tokens,
                note.num_free_blocks,
                note.num_waiting,
                steps + 1,
                narrow + num_rows - len(wide),
                len(wide),
                _NO_REASON if note.blocked_by is None else note.blocked_by,
                note.pressure,
                thin,
                tuple(events),
            )
        )

    def stepped(
        self, plan: SchedulerOutput, done: float, seconds: float, events: list[Event]
    ) -> bytes:
        """Return the DONE of a plan that was written, else b"".

        Args:
            events: changes of requests by the result.
        """
        told_rows = self._open.pop(plan.step_id, None)
        if told_rows is None:
            return b""
        if plan.drafts and told_rows:
            self._wrong(plan, events)
        return encode(Done(plan.step_id, done, seconds, tuple(events)))

    def forget(self) -> None:
        """Forget written plans, whose results will not be written."""
        self._open.clear()

    def _merge(self, plan: SchedulerOutput) -> None:
        steps, tokens, narrow, chunks = self._merged
        num_rows = len(plan.rows)
        is_wide = plan.num_tokens > num_rows
        self._merged = (
            steps + 1,
            tokens + plan.num_tokens,
            narrow + (0 if is_wide else num_rows),
            chunks + is_wide,
        )

    def _rows(
        self, plan: SchedulerOutput, wide: Sequence[ScheduledRow], events: list[Event]
    ) -> None:
        """Write which requests compute several tokens, one token again, or none."""
        lanes, known = self._lanes, self._known
        drafts = {plan.rows[draft.row][_ID] for draft in plan.drafts} if plan.drafts else ()
        before, lanes.odd = lanes.odd, {}
        for row in wide:
            entry = known.get(row[_ID])
            if entry is None or entry.lane == NO_LANE:
                continue
            if row[_ID] in drafts:
                events.append(Event(entry.lane, _DRAFT, row[_WIDTH]))
                entry.mode = _DECODE
                continue
            events.append(Event(entry.lane, _CHUNK, row[_WIDTH]))
            entry.mode = _CHUNKED
            lanes.odd[entry] = None
            if entry.request.history.demoted != entry.demoted:
                lanes.turn_target(entry, events)
        if len(plan.rows) < lanes.num_running:
            lanes.skip({row[_ID] for row in plan.rows}, events)
        if before:
            lanes.narrow(before, events)

    def _wrong(self, plan: SchedulerOutput, events: list[Event]) -> None:
        """Write how many tokens of rows with drafts count as not computed after all. No later step
        is planned yet: tokens after drafts are not known before their result."""
        for draft in plan.drafts:
            row = plan.rows[draft.row]
            entry = self._known.get(row[_ID])
            if entry is None or entry.lane == NO_LANE:
                continue
            wrong = row.start + row.num_tokens - entry.request.num_computed_tokens
            # all tokens of a request that ended or was preempted meanwhile are gone
            if wrong > 0 and entry.request.status is _RUNNING:
                events.append(Event(entry.lane, _WRONG, wrong))


def _wide(plan: SchedulerOutput) -> list[ScheduledRow]:
    """Return rows of several tokens. With most policies these are last, so the search begins at the
    end, and stops when it has found all."""
    excess = plan.num_tokens - len(plan.rows)
    wide = []
    for row in reversed(plan.rows):
        if not excess:
            break
        if row[_WIDTH] > 1:
            excess -= row[_WIDTH] - 1
            wide.append(row)
    return wide
