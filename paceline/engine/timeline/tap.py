"""Tells what an engine does, as frames, at a cost that is bounded.

Called by ``EngineCore`` beside the recorder, on the engine's thread, in the order in which things
happen: a plan is told when it is made and again when its result is in, so that at a pipeline depth
of 2 too a reader sees exactly what the scheduler sees. Of a plan whose rows are those of the one
before, a token each, nothing but its numbers is told.

The ladder: the tap measures what it takes itself, and once a second tells less, or more again::

    level   told
    0       everything
    1       in one step of eight, who computed a chunk and who sat out; all else always
    2       steps summed over 10 ms, but for those in which a request came or went
    3       requests that come and end, and nothing of steps

This module does not know who watches.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import RequestUpdate, ScheduledRow, SchedulerOutput, StepNote
from paceline.core.queues.wait_clocks import REASONS
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.engine.timeline.codec import (
    encode,
    encode_announce,
    encode_done,
    encode_end,
    encode_plan,
)
from paceline.engine.timeline.events import (
    ENDS,
    NO_LANE,
    Event,
    FrameType,
    Keyframe,
    Kind,
    LaneState,
    Plan,
    State,
    Told,
)

__all__ = ["LEVELS", "TimelineTap"]

LEVELS: Final = 4
# seconds between keyframes, and between messages to whoever serves viewers
_KEYFRAME: Final = 2.0
_FLUSH: Final = 0.05
# share of a core above which less is told, and below which more is; seconds before it is tried
_MOST: Final = 0.01
_LEAST: Final = 0.005
_PATIENCE: Final = 10.0
# steps at level 1 of which one is told whole
_THIN: Final = 8
# seconds of which one step stands for all at level 2
_BIN: Final = 0.01
_NO_REASON: Final = 255
_NAN: Final = math.nan
_WIDTH: Final = 2
# as plain numbers, which are packed sooner
_ADMIT, _HELD, _FOUND = int(Kind.ADMIT), int(Kind.HELD), int(Kind.FOUND)
_CHUNK, _NARROW = int(Kind.CHUNK), int(Kind.NARROW)
_ENDS: Final = {reason: ENDS.index(reason.value) for reason in FinishReason}
_NO_WAITS: Final = (0.0,) * len(REASONS)
_EXPIRED: Final = ENDS.index("expired")
_TIMELINE: Final = itemgetter(RequestUpdate._fields.index("timeline"))


class _Entry:
    """A request that has not ended."""

    __slots__ = ("lane", "mode", "number", "paused", "relegated", "request", "since")

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.lane = NO_LANE
        # of its lane, as it was told last
        self.mode = State.DECODE
        # PREEMPTED or SWAPPED while it waits again; WAIT: it never ran
        self.paused = State.WAIT
        self.relegated = False
        # when it was admitted or preempted
        self.since = 0.0


class TimelineTap:
    """A ``Recorder``.

    Args:
        clock: what its own cost is measured by.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._queue_timeout = scheduler.queue_timeout_s
        self._known: dict[str, _Entry] = {}
        self._num_known = 0
        # by lane; None: it is free
        self._lanes: list[_Entry | None] = []
        self._free: list[int] = []
        self._num_running = 0
        # those told to be in another mode than DECODE, and those whose targets were given up
        # (in the order in which they became so: the same run tells the same bytes)
        self._odd: dict[_Entry, None] = {}
        self._relegated: dict[_Entry, None] = {}
        self._buffer = bytearray()
        self._next_keyframe = 0.0
        self._next_flush = 0.0
        # steps whose plan was told and whose result was not
        self._open: set[int] = set()
        # the ladder: own seconds since it was looked at
        self.level = 0
        self._spent = 0.0
        self._looked_at = -math.inf
        self._lowered_at = -math.inf
        # at level 2: steps, tokens and rows that the next PLAN stands for besides
        self._merged = (0, 0, 0, 0)
        self._told_at = -math.inf
        self._unsure = False
        start = {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "policy": scheduler.policy,
            "num_blocks": cache.num_blocks,
            "block_size": cache.block_size,
            "num_host_blocks": cache.num_host_blocks,
        }
        # told with the first news, when somebody is sure to listen
        self._start = encode(Told(FrameType.START, start))

    @property
    def num_bytes(self) -> int:
        """Told and not taken."""
        return len(self._buffer)

    def take(self, now: float, *, idle: bool = False) -> bytes:
        """What was told since the last time; b"" where it is not worth a message yet."""
        if now < self._next_flush and not idle:
            return b""
        self._next_flush = now + _FLUSH
        if now - self._looked_at >= 1.0:
            self._look(now)
        if not self._buffer:
            return b""
        told = self._start + self._buffer
        self._start = b""
        self._buffer.clear()
        return told

    # ------------------------------------------------------------------ a Recorder

    def added(self, request: Request, now: float) -> None:
        began = self._clock()
        self._num_known += 1
        entry = self._known[request.request_id] = _Entry(self._num_known, request)
        asked, slo, history = request.asked, request.asked.slo, request.history
        parent = None if asked.fork_of is None else self._known.get(asked.fork_of)
        self._buffer += encode_announce(
            number=entry.number,
            parent=0 if parent is None else parent.number,
            arrival=asked.arrival_time,
            added=now,
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=asked.sampling.max_tokens,
            priority=asked.priority,
            best_effort=slo.best_effort,
            resumed=asked.resumed is not None,
            ttft=_NAN if slo.ttft is None else slo.ttft,
            tpot=_NAN if slo.tpot is None else slo.tpot,
            deadline=_NAN if slo.deadline is None else slo.deadline,
            predicted_ttft=_or_nan(history.predicted_ttft),
            request_id=request.request_id,
            slo_class=slo.slo_class,
            tenant=asked.tenant,
        )
        self._spent += self._clock() - began

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        if self.level == LEVELS - 1:
            return
        began = self._clock()
        self._tell(plan, now, note)
        if now >= self._next_keyframe:
            # behind the plan: requests are as it left them
            self._next_keyframe = now + _KEYFRAME
            self._keyframe(plan.step_id + 1, now, self._unsure)
            self._unsure = False
        self._spent += self._clock() - began

    def stepped(
        self,
        plan: SchedulerOutput,
        planned: float,
        done: float,
        seconds: float,
        updates: Sequence[RequestUpdate],
    ) -> None:
        if self.level == LEVELS - 1:
            return
        began = self._clock()
        # set with the end of a request, and with what its caller has not been told yet
        news = filter(_TIMELINE, updates)
        events: list[Event] = []
        ended: list[_Entry] = []
        for update in news:
            entry = self._known.get(update.request_id)
            if entry is None:
                continue
            if update.finish_reason is not None:
                ended.append(entry)
            elif entry.lane != NO_LANE and entry.request.history.demoted != entry.relegated:
                events.append(self._relegate(entry))
        if plan.step_id in self._open:
            self._open.discard(plan.step_id)
            self._buffer += encode_done(plan.step_id, done, seconds, events)
        for entry in ended:
            self._end(entry, done)
        self._spent += self._clock() - began

    def ended(self, request_ids: Sequence[str], now: float) -> None:
        began = self._clock()
        for request_id in request_ids:
            entry = self._known.get(request_id)
            # a new one may have taken the id of one that had ended before
            if entry is not None and entry.request.status is RequestStatus.FINISHED:
                self._end(entry, now)
        self._spent += self._clock() - began

    def close(self) -> None:
        self._known.clear()

    # ------------------------------------------------------------------ a step

    def _tell(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        rows = plan.rows
        num_rows = len(rows)
        events: list[int] = []
        for request_id in plan.released:
            entry = self._known.get(request_id)
            # of those that ended, the lane is free already
            if entry is not None and entry.lane != NO_LANE:
                self._preempt(entry, now, events)
        admitted = []
        for new in plan.new_requests:
            entry = self._known.get(new.request_id)
            if entry is not None and entry.request.status is RequestStatus.RUNNING:
                self._admit(entry, now, events)
                admitted.append(entry)
        changed = bool(events)
        if self.level == 2 and not changed and now - self._told_at < _BIN:
            steps, tokens, narrow, chunks = self._merged
            is_wide = plan.num_tokens > num_rows
            self._merged = (
                steps + 1,
                tokens + plan.num_tokens,
                narrow + (0 if is_wide else num_rows),
                chunks + is_wide,
            )
            return
        thin = self.level == 2 or (self.level == 1 and plan.step_id % _THIN != 0)
        wide: list[ScheduledRow] = []
        if plan.num_tokens > num_rows or self._odd or num_rows < self._num_running or admitted:
            wide = _wide(plan)
            if not thin:
                self._rows(plan, wide, events)
        if admitted:
            starts = {row[0]: row.start for row in wide}
            for entry in admitted:
                # a row of one token begins where all but that one is there
                request = entry.request
                found = starts.get(request.request_id, request.num_computed_tokens - 1)
                if found:
                    events += (entry.lane, _FOUND, 0, found)
        for entry in tuple(self._relegated) if self._relegated else ():
            if not entry.request.history.demoted:
                events += (*self._relegate(entry)[:2], 0, 0)
        steps, tokens, narrow, _ = self._merged
        if steps:
            self._merged = (0, 0, 0, 0)
        self._told_at = now
        self._open.add(plan.step_id)
        self._buffer += encode_plan(
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
                _NO_REASON if note.held_by is None else note.held_by,
                note.pressure,
                thin,
                (),
            ),
            events,
        )

    def _rows(self, plan: SchedulerOutput, wide: Sequence[ScheduledRow], events: list[int]) -> None:
        """Tell who computes several tokens, who one again, and who none."""
        known, odd = self._known, self._odd
        drafts = {plan.rows[draft.row][0] for draft in plan.drafts} if plan.drafts else ()
        before, self._odd = odd, {}
        for row in wide:
            entry = known.get(row[0])
            if entry is None or entry.lane == NO_LANE:
                continue
            guessed = row[0] in drafts
            events += (entry.lane, Kind.DRAFT if guessed else _CHUNK, 0, row[_WIDTH])
            entry.mode = State.DECODE if guessed else State.CHUNK
            if not guessed:
                self._odd[entry] = None
                if entry.request.history.demoted != entry.relegated:
                    event = self._relegate(entry)
                    events += (event.lane, event.kind, 0, 0)
        if len(plan.rows) < self._num_running:
            served = {row[0] for row in plan.rows}
            for lane in self._lanes:
                if lane is not None and lane.request.request_id not in served:
                    if lane.mode is not State.SKIPPED:
                        lane.mode = State.SKIPPED
                        events += (lane.lane, Kind.SKIP, 0, 0)
                    self._odd[lane] = None
        for entry in before:
            if entry not in self._odd and entry.lane != NO_LANE and entry.mode is not State.DECODE:
                entry.mode = State.DECODE
                events += (entry.lane, _NARROW, 0, 0)

    def _admit(self, entry: _Entry, now: float, events: list[int]) -> None:
        if entry.lane != NO_LANE:
            return
        lane = self._give_lane(entry)
        entry.since = now
        events += (lane, _ADMIT, 0, entry.number)
        request = entry.request
        if entry.paused is State.WAIT and request.asked.fork_of is not None:
            held = max(0.0, request.history.waiting_since - request.asked.arrival_time)
            events += (lane, _HELD, 0, min(round(held * 1e6), 0xFFFFFFFF))
        if request.history.demoted != entry.relegated:
            event = self._relegate(entry)
            events += (event.lane, event.kind, 0, 0)
        elif entry.relegated:
            self._relegated[entry] = None

    def _preempt(self, entry: _Entry, now: float, events: list[int]) -> None:
        request = entry.request
        swapped = request.num_swapped_tokens
        since = request.history.waiting_since
        if since < now:
            earlier = min(round((now - since) * 1e6), 0xFFFFFFFF)
            events += (entry.lane, Kind.EARLIER, 0, earlier)
        if swapped:
            events += (entry.lane, Kind.SWAP, 0, swapped)
        else:
            events += (entry.lane, Kind.PREEMPT, 0, request.history.num_lost_tokens)
        entry.paused = State.SWAPPED if swapped else State.PREEMPTED
        entry.since = since
        self._take_lane(entry)

    def _give_lane(self, entry: _Entry) -> int:
        if self._free:
            lane = heapq.heappop(self._free)
            self._lanes[lane] = entry
        else:
            lane = len(self._lanes)
            self._lanes.append(entry)
        entry.lane, entry.mode = lane, State.DECODE
        self._num_running += 1
        return lane

    def _take_lane(self, entry: _Entry) -> None:
        self._lanes[entry.lane] = None
        heapq.heappush(self._free, entry.lane)
        entry.lane = NO_LANE
        self._num_running -= 1
        self._odd.pop(entry, None)
        self._relegated.pop(entry, None)

    def _relegate(self, entry: _Entry) -> Event:
        """What became of a running request's targets."""
        entry.relegated = entry.request.history.demoted
        if entry.relegated:
            self._relegated[entry] = None
        else:
            self._relegated.pop(entry, None)
        return Event(entry.lane, Kind.RELEGATE if entry.relegated else Kind.PROMOTE)

    def _end(self, entry: _Entry, now: float) -> None:
        request, history = entry.request, entry.request.history
        del self._known[request.request_id]
        if entry.lane != NO_LANE:
            self._take_lane(entry)
        self._buffer += encode_end(
            number=entry.number,
            when=now,
            reason=self._reason(request, now),
            relegated=history.demoted,
            waits=history.waits or _NO_WAITS,
            chunks=history.num_chunks,
            preemptions=request.num_preemptions,
            recomputed=history.num_recomputed_tokens,
            swapped=history.num_restored_tokens,
            cached=request.num_cached_tokens,
            output_tokens=request.num_output_tokens,
            first_scheduled=_or_nan(request.first_scheduled_time),
            first_token=_or_nan(request.first_token_time),
            predicted_ttft=_or_nan(history.predicted_ttft),
        )

    def _reason(self, request: Request, now: float) -> int:
        reason = request.finish_reason or FinishReason.ABORT
        if reason is FinishReason.ABORT and request.first_scheduled_time is None:
            limits = (request.asked.slo.queue_ttl, self._queue_timeout)
            waited = now - request.asked.arrival_time
            if any(limit is not None and waited >= limit for limit in limits):
                return _EXPIRED
        return _ENDS[reason]

    def _keyframe(self, step: int, now: float, reset: bool) -> None:
        entries = [lane for lane in self._lanes if lane is not None]
        entries += [
            entry
            for entry in self._known.values()
            if entry.lane == NO_LANE and entry.paused is not State.WAIT
        ]
        lanes = tuple(_lane_state(entry) for entry in entries)
        self._buffer += encode(Keyframe(step, now, reset, lanes))

    # ------------------------------------------------------------------ the ladder

    def _look(self, now: float) -> None:
        share = self._spent / (now - self._looked_at) if self._looked_at > -math.inf else 0.0
        self._looked_at, self._spent = now, 0.0
        if self.level == LEVELS - 1:
            # nobody has told of those that ended in steps
            self._drop_ended(now)
        if share > _MOST and self.level < LEVELS - 1:
            self._set_level(self.level + 1, share)
            self._lowered_at = now
        elif share < _LEAST and self.level and now - self._lowered_at >= _PATIENCE:
            if self.level == LEVELS - 1:
                self._find_lanes(now)
            self._set_level(self.level - 1, share)
            self._lowered_at = now

    def _set_level(self, level: int, share: float) -> None:
        self.level = level
        told = {"kind": "level", "level": level, "every": _THIN, "share": round(share, 5)}
        self._buffer += encode(Told(FrameType.NOTICE, told))

    def _drop_ended(self, now: float) -> None:
        for entry in list(self._known.values()):
            if entry.request.status is RequestStatus.FINISHED:
                self._end(entry, now)

    def _find_lanes(self, now: float) -> None:
        """Steps were not followed: who runs now, and who not any more."""
        for entry in self._known.values():
            runs = entry.request.status is RequestStatus.RUNNING
            if entry.lane != NO_LANE and not runs:
                self._take_lane(entry)
                entry.since = now
                swapped = entry.request.num_swapped_tokens
                entry.paused = State.SWAPPED if swapped else State.PREEMPTED
            elif entry.lane == NO_LANE and runs:
                self._give_lane(entry)
                entry.since = entry.request.first_scheduled_time or now
            entry.relegated = entry.request.history.demoted
        self._relegated = {e: None for e in self._lanes if e is not None and e.relegated}
        self._open.clear()
        self._next_keyframe, self._unsure = 0.0, True


def _wide(plan: SchedulerOutput) -> list[ScheduledRow]:
    """Rows of several tokens. Most policies have newcomers last, so the search begins there, and it
    ends with the last of them."""
    excess = plan.num_tokens - len(plan.rows)
    wide = []
    for row in reversed(plan.rows):
        if not excess:
            break
        if row[_WIDTH] > 1:
            excess -= row[_WIDTH] - 1
            wide.append(row)
    return wide


def _lane_state(entry: _Entry) -> LaneState:
    request = entry.request
    return LaneState(
        number=entry.number,
        lane=entry.lane,
        state=entry.paused if entry.lane == NO_LANE else entry.mode,
        relegated=entry.relegated,
        computed=request.num_computed_tokens,
        preemptions=request.num_preemptions,
        waited=sum(request.history.waits),
        since=entry.since,
    )


def _or_nan(value: float | None) -> float:
    return _NAN if value is None else value
