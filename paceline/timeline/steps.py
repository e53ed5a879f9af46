"""Frames of plans and their results, and how much of an engine's work they cover, by their cost.

A step with the same rows as the one before, a token each, takes only its numbers. ::

    level   written
    0       everything
    1       chunks and skipped requests in one step of eight only; everything else
    2       steps summed over 10 ms, except those in which a request came or left
    3       arrivals and ends of requests, and no steps

Once a second the level rises by one if writing took more than a percent of a core, or falls again
if it has taken less than half of that for a while. This module does not know the viewers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.core.outputs import ScheduledRow, SchedulerOutput, StepNote
from paceline.core.request import RequestStatus
from paceline.timeline.codec import encode
from paceline.timeline.events import NO_LANE, Done, Event, FrameType, Kind, Plan, State, Told
from paceline.timeline.lanes import Entry, Lanes

__all__ = ["LEVELS", "THIN", "Ladder", "Steps"]

LEVELS: Final = 4
# steps at level 1 of which one is written completely
THIN: Final = 8
# share of a core above which less is written, and below which more is; seconds before more is tried
_MOST: Final = 0.01
_LEAST: Final = 0.005
_PATIENCE: Final = 10.0
# seconds between checks
_LOOK: Final = 1.0


class Ladder:
    """The level, and its basis: the writer adds the seconds that it takes to ``spent``."""

    def __init__(self) -> None:
        self.level = 0
        self.spent = 0.0
        self._looked_at = -math.inf
        self._lowered_at = -math.inf

    @property
    def tells_steps(self) -> bool:
        return self.level < LEVELS - 1

    def is_due(self, now: float) -> bool:
        return now - self._looked_at >= _LOOK

    def look(self, now: float) -> bytes:
        """Update the level; return a frame about its change, else no bytes."""
        share = self.spent / (now - self._looked_at)
        self._looked_at, self.spent = now, 0.0
        if share > _MOST and self.tells_steps:
            self.level += 1
        elif share < _LEAST and self.level and now - self._lowered_at >= _PATIENCE:
            self.level -= 1
        else:
            return b""
        self._lowered_at = now
        told = {"kind": "level", "level": self.level, "every": THIN, "share": round(share, 5)}
        return encode(Told(FrameType.NOTICE, told))


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
        steps, tokens, narrow, chunks = self._merged
        verifying, drafted = _drafted(plan)
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
                narrow + num_rows - len(wide) + drafted,
                chunks + len(wide) - verifying,
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
        verifying, drafted = _drafted(plan)
        # without the row itself, which num_rows counts
        drafted -= verifying
        is_wide = plan.num_tokens - drafted > num_rows
        self._merged = (
            steps + 1,
            tokens + plan.num_tokens,
            narrow + (0 if is_wide else num_rows) + drafted,
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


def _drafted(plan: SchedulerOutput) -> tuple[int, int]:
    """Return how many rows verify draft tokens, and the tokens that count as written: all of such a
    row, which is one of the wide ones."""
    if not plan.drafts:
        return 0, 0
    rows = {draft.row for draft in plan.drafts}
    return len(rows), sum(plan.rows[row][_WIDTH] for row in rows)


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
