"""Writing of an engine's timeline, as frames, at a bounded cost.

::

    EngineCore, EngineLoop --> tap.py       grammar waits, refusals
                           --> steps.py     plans and results, and the level of detail
                           --> lanes.py     lanes of running requests

``EngineCore`` calls it in addition to the recorder, on the engine's thread, in the order of events:
when a plan is made and again when its result is in, so that also at a pipeline depth of 2 a reader
sees exactly what the scheduler sees.

This module does not know the viewers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepNote
from paceline.core.queues.wait_clocks import REASONS
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.timeline.codec import clipped, encode
from paceline.timeline.events import (
    ENDS,
    NO_LANE,
    Announce,
    End,
    Event,
    FrameType,
    Keyframe,
    State,
    Told,
)
from paceline.timeline.lanes import Entry, Lanes
from paceline.timeline.steps import Ladder, Steps

__all__ = ["Door", "TimelineTap"]

# most requests named in one frame
_MOST_HELD: Final = 64
_MOST_REFUSED: Final = 32


class _Asked(NamedTuple):
    request_id: str
    slo_class: str
    tenant: str
    # time of arrival, or of the refusal
    time: float


class Door:
    """Frames about requests before the engine's queue: those that wait there, and those refused.

    Requests that wait for their grammar are listed all together whenever one is added or removed,
    so a reader that begins at any time knows them; refused requests are listed once. Only a limited
    number of both is named, so that a flood of them costs no more. An error's text may hold a
    caller's input, so only its kind is written.

    Gets each request that begins to wait for its grammar, the ids that are left when others stop
    waiting, and each refusal."""

    def __init__(self) -> None:
        self._held: dict[str, _Asked] = {}
        self._refused: list[tuple[_Asked, str]] = []
        self._num_refused = 0
        self._changed = False

    def hold(self, request_id: str, slo_class: str, tenant: str, arrival: float) -> None:
        self._held[request_id] = _Asked(request_id, slo_class, tenant, arrival)
        self._changed = True

    def keep(self, request_ids: Collection[str]) -> None:
        """Keep only these of the waiting requests."""
        if len(request_ids) != len(self._held):
            kept = set(request_ids)
            self._held = {name: asked for name, asked in self._held.items() if name in kept}
            self._changed = True

    def refuse(self, request_id: str, slo_class: str, tenant: str, now: float, kind: str) -> None:
        """Note a refusal; ``kind``: the reason of a QueueFullError, or another error's name."""
        self._num_refused += 1
        self._changed = True
        if len(self._refused) < _MOST_REFUSED:
            self._refused.append((_Asked(request_id, slo_class, tenant, now), kind))

    def take(self, *, whole: bool) -> bytes:
        """Return the news since the last call; ``whole``: the waiting requests in any case, for a
        reader that begins here."""
        if not (self._changed or (whole and self._held)):
            return b""
        held = list(self._held.values())[:_MOST_HELD]
        told = {
            "held": [_named(asked) for asked in held],
            "num_held": len(self._held),
            "refused": [[*_named(asked), kind] for asked, kind in self._refused],
            "num_refused": self._num_refused,
        }
        self._refused, self._num_refused, self._changed = [], 0, False
        return encode(Told(FrameType.DOOR, told))


def _named(asked: _Asked) -> list[str | float]:
    return [*map(clipped, asked[:3]), round(asked.time, 6)]


# seconds between keyframes, and between messages to the process that serves viewers
_KEYFRAME: Final = 2.0
_FLUSH: Final = 0.05
_ENDS: Final = {reason: ENDS.index(reason.value) for reason in FinishReason}
# most that a frame holds of a number that callers choose
_MOST: Final = 2**63 - 1
_NO_WAITS: Final = (0.0,) * len(REASONS)
_EXPIRED: Final = ENDS.index("expired")
# index in an update
_TIMELINE: Final = RequestUpdate._fields.index("timeline")
# looked up once: a member of an enum takes longer to reach than a name of the module
_FINISHED: Final = RequestStatus.FINISHED
_ABORT: Final = FinishReason.ABORT
_WAIT: Final = State.WAIT


class TimelineTap:
    """A ``Recorder`` that writes frames.

    Args:
        clock: measures the tap's own cost.
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
        self._known: dict[str, Entry] = {}
        self._num_known = 0
        self._lanes = Lanes()
        self._steps = Steps(self._known, self._lanes)
        self.ladder = Ladder()
        self.door = Door()
        self._buffer = bytearray()
        self._next_keyframe = 0.0
        self._next_flush = 0.0
        # steps were left out before the next keyframe; one was written since the last message
        self._unsure = False
        self._framed = False
        start = {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "policy": scheduler.policy,
            "num_blocks": cache.num_blocks,
            "block_size": cache.block_size,
            "num_host_blocks": cache.num_host_blocks,
        }
        # written with the first frames, when there surely is a reader
        self._start = encode(Told(FrameType.START, start))

    @property
    def num_bytes(self) -> int:
        """Bytes written and not taken."""
        return len(self._buffer)

    def take(self, now: float, *, idle: bool = False) -> bytes:
        """Return the bytes since the last call; b"" while they are not worth a message yet."""
        if now < self._next_flush and not idle:
            return b""
        self._next_flush = now + _FLUSH
        if self.ladder.is_due(now):
            self._look(now)
        self._buffer += self.door.take(whole=self._framed)
        self._framed = False
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
        entry = self._known[request.request_id] = Entry(self._num_known, request)
        asked = request.asked
        slo = asked.slo
        parent = None if asked.fork_of is None else self._known.get(asked.fork_of)
        self._buffer += encode(
            Announce(
                entry.number,
                0 if parent is None else parent.number,
                asked.arrival_time,
                now,
                request.num_prompt_tokens,
                min(asked.sampling.max_tokens, _MOST),
                max(-_MOST, min(asked.priority, _MOST)),
                slo.best_effort,
                asked.resumed is not None,
                slo.ttft,
                slo.tpot,
                slo.deadline,
                request.history.predicted_ttft,
                clipped(request.request_id),
                clipped(slo.slo_class),
                clipped(asked.tenant),
            )
        )
        self.ladder.spent += self._clock() - began

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        ladder = self.ladder
        if not ladder.tells_steps:
            return
        began = self._clock()
        self._buffer += self._steps.planned(plan, now, note, ladder.level)
        if now >= self._next_keyframe:
            # after the plan: requests are as the plan left them
            self._next_keyframe = now + _KEYFRAME
            self._keyframe(plan.step_id + 1, now)
        ladder.spent += self._clock() - began

    def stepped(
        self,
        plan: SchedulerOutput,
        planned: float,
        done: float,
        seconds: float,
        updates: Sequence[RequestUpdate],
    ) -> None:
        ladder = self.ladder
        if not ladder.tells_steps:
            return
        began = self._clock()
        known = self._known
        events: list[Event] = []
        ended: list[Entry] = []
        # set with the end of a request, and with history that its caller has not been sent yet
        for update in [update for update in updates if update[_TIMELINE] is not None]:
            entry = known.get(update.request_id)
            if entry is None:
                continue
            if update.finish_reason is not None:
                ended.append(entry)
            elif entry.lane != NO_LANE and entry.request.history.demoted != entry.demoted:
                self._lanes.turn_target(entry, events)
        self._buffer += self._steps.stepped(plan, done, seconds, events)
        for entry in ended:
            self._end(entry, done)
        ladder.spent += self._clock() - began

    def ended(self, request_ids: Sequence[str], now: float) -> None:
        began = self._clock()
        for request_id in request_ids:
            entry = self._known.get(request_id)
            # a new request may have the id of one that had ended before
            if entry is not None and entry.request.status is _FINISHED:
                self._end(entry, now)
        self.ladder.spent += self._clock() - began

    def close(self) -> None:
        self._known.clear()

    # ------------------------------------------------------------------ inside

    def _end(self, entry: Entry, now: float) -> None:
        request, history = entry.request, entry.request.history
        del self._known[request.request_id]
        self._lanes.leave(entry)
        self._buffer += encode(
            End(
                entry.number,
                now,
                self._reason(request, now),
                history.demoted,
                tuple(history.waits) or _NO_WAITS,
                history.num_chunks,
                request.num_preemptions,
                history.num_recomputed_tokens,
                history.num_restored_tokens,
                request.num_cached_tokens,
                request.num_output_tokens,
                request.first_scheduled_time,
                request.first_token_time,
                history.predicted_ttft,
            )
        )

    def _reason(self, request: Request, now: float) -> int:
        reason = request.finish_reason or _ABORT
        if reason is _ABORT and request.first_scheduled_time is None:
            limits = (request.asked.slo.queue_ttl, self._queue_timeout)
            waited = now - request.asked.arrival_time
            if any(limit is not None and waited >= limit for limit in limits):
                return _EXPIRED
        return _ENDS[reason]

    def _keyframe(self, step: int, now: float) -> None:
        entries = self._lanes.running()
        entries += [
            entry
            for entry in self._known.values()
            if entry.lane == NO_LANE and entry.paused is not _WAIT
        ]
        lanes = tuple([entry.state() for entry in entries])
        self._buffer += encode(Keyframe(step, now, self._unsure, lanes))
        self._unsure, self._framed = False, True

    def _look(self, now: float) -> None:
        told_before = self.ladder.tells_steps
        if not told_before:
            # ends within steps were not written at this level
            for entry in list(self._known.values()):
                if entry.request.status is _FINISHED:
                    self._end(entry, now)
        frame = self.ladder.look(now)
        if self.ladder.tells_steps and not told_before:
            self._lanes.find(self._known.values(), now)
            self._steps.forget()
            self._next_keyframe, self._unsure = 0.0, True
        self._buffer += frame
