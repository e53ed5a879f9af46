"""State of requests, rebuilt from frames: which run or wait, and since when.

Tests compare it with the scheduler, and traces are written from it. The page has the same in
JavaScript (``timeline/model.js``); both are held to the vectors in ``tests/ui/vectors``.

This module does not know where frames come from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.timeline.events import (
    ENDS,
    NO_LANE,
    Announce,
    Done,
    End,
    Event,
    Frame,
    FrameType,
    Keyframe,
    Kind,
    Plan,
    State,
    Told,
)

__all__ = ["Model", "Seen", "Span", "Step"]


class Span(NamedTuple):
    """Time of a request in one state. Times are seconds of the engine's clock."""

    state: State
    start: float
    end: float
    # NO_LANE while it waits
    lane: int
    # steps in which it computed, and tokens computed in these
    steps: int
    tokens: int


@dataclass(slots=True, eq=False)
class Seen:
    """A request as far as frames say. ``told`` is None if it arrived before the reader."""

    number: int
    told: Announce | None = None
    state: State = State.WAIT
    lane: int = NO_LANE
    demoted: bool = False
    # time at which the state began
    since: float = 0.0
    computed: int = 0
    preemptions: int = 0
    # seconds in WAIT, PREEMPTED and SWAPPED that are over
    waited: float = 0.0
    # in the present state
    steps: int = 0
    tokens: int = 0
    spans: list[Span] = field(default_factory=list)
    ended: End | None = None

    @property
    def end(self) -> str | None:
        return None if self.ended is None else ENDS[self.ended.reason]


@dataclass(slots=True, eq=False)
class Step:
    """A planned step."""

    plan: Plan
    done: Done | None = None
    # time at which it began to run: when planned, or when the one before was done
    start: float = math.nan


# most refusals that are kept by name
_MOST_REFUSED = 256
_WAITS = (State.WAIT, State.PREEMPTED, State.SWAPPED)
_RUNS = (State.CHUNK, State.DECODE, State.SKIPPED)


class Model:
    """Processes frames, in order.

    Args:
        on_step: called with every step that has a result.
        on_ended: called with every request that ended; the model forgets it.
    """

    def __init__(
        self,
        on_step: Callable[[Step], None] = lambda _: None,
        on_ended: Callable[[Seen], None] = lambda _: None,
    ) -> None:
        self._on_step = on_step
        self._on_ended = on_ended
        self.requests: dict[int, Seen] = {}
        # by lane; 0: free
        self.lanes: list[int] = []
        self.steps: dict[int, Step] = {}
        self.step = -1
        self.now = -math.inf
        self._done = -math.inf
        # number of frames that contradict known state; 0 for a correct reader
        self.num_doubts = 0
        # lanes are unknown until the first keyframe, or the start of an engine
        self.synced = False
        self.start: Mapping[str, Any] = {}
        self.hello: Mapping[str, Any] = {}
        self.gauges: Mapping[str, Any] = {}
        self.gaps: list[Mapping[str, Any]] = []
        self.notices: list[Mapping[str, Any]] = []
        # requests that wait for a grammar, and all refused ones, as DOOR names them
        self.held: list[list[Any]] = []
        self.num_held = 0
        self.refused: deque[list[Any]] = deque(maxlen=_MOST_REFUSED)
        self.num_refused = 0

    def take(self, frame: Frame) -> None:
        if isinstance(frame, Plan):
            self._plan(frame)
        elif isinstance(frame, Done):
            self._take_done(frame)
        elif isinstance(frame, Announce):
            self._announce(frame)
        elif isinstance(frame, End):
            self._end(frame)
        elif isinstance(frame, Keyframe):
            self._keyframe(frame)
        else:
            self._told(frame)

    # ------------------------------------------------------------------ views

    def running(self) -> Iterator[Seen]:
        """Yield requests in lane order."""
        for number in self.lanes:
            if number in self.requests:
                yield self.requests[number]

    def waiting(self) -> Iterator[Seen]:
        """Yield requests in order of arrival."""
        return (seen for seen in self.requests.values() if seen.lane == NO_LANE)

    # ------------------------------------------------------------------ frames

    def _announce(self, frame: Announce) -> None:
        self.now = max(self.now, frame.added)
        seen = self.requests.get(frame.number)
        if seen is None:
            seen = self.requests[frame.number] = Seen(frame.number, since=frame.arrival)
            if frame.parent:
                seen.state = State.HELD
        seen.told = frame

    def _plan(self, plan: Plan) -> None:
        self.step, self.now = plan.step, max(self.now, plan.planned)
        self.steps[plan.step] = Step(plan)
        chunked: dict[int, int] = {}
        earlier = 0.0
        for event in plan.events:
            if event.kind == Kind.ADMIT:
                self._admit(event, plan.planned)
                continue
            seen = self._at(event.lane)
            if seen is None:
                # an event of a request that ended after the plan was made
                continue
            if event.kind in (Kind.CHUNK, Kind.DRAFT):
                chunked[event.lane] = event.value
                state = State.CHUNK if event.kind == Kind.CHUNK else State.DECODE
                self._turn(seen, state, plan.planned)
            elif event.kind == Kind.EARLIER:
                earlier = event.value / 1e6
            else:
                self._event(seen, event, plan.planned - earlier)
                earlier = 0.0
        for lane in range(len(self.lanes)):
            seen = self._at(lane)
            if seen is None:
                continue
            tokens = chunked.get(lane, plan.merged if seen.state is State.DECODE else 0)
            if tokens:
                seen.steps += 1
                seen.tokens += tokens
                seen.computed += tokens

    def _event(self, seen: Seen, event: Event, now: float) -> None:
        kind = event.kind
        if kind == Kind.FOUND:
            seen.computed += event.value
        elif kind == Kind.HELD:
            self._held(seen, event.value / 1e6)
        elif kind == Kind.NARROW:
            self._turn(seen, State.DECODE, now)
        elif kind == Kind.SKIP:
            self._turn(seen, State.SKIPPED, now)
        elif kind in (Kind.PREEMPT, Kind.SWAP):
            self._turn(seen, State.SWAPPED if kind == Kind.SWAP else State.PREEMPTED, now)
            seen.preemptions += 1
            seen.computed = 0
            self.lanes[seen.lane], seen.lane = 0, NO_LANE
        elif kind == Kind.WRONG:
            seen.computed = max(0, seen.computed - event.value)
        elif kind in (Kind.DEMOTE, Kind.PROMOTE):
            seen.demoted = kind == Kind.DEMOTE

    def _take_done(self, frame: Done) -> None:
        self.now = max(self.now, frame.done)
        for event in frame.events:
            seen = self._at(event.lane)
            if seen is not None:
                self._event(seen, event, frame.done)
        step = self.steps.pop(frame.step, None)
        if step is not None:
            step.done = frame
            step.start = max(step.plan.planned, self._done)
            self._on_step(step)
        self._done = frame.done
        for number in [number for number in self.steps if number < frame.step]:
            # its result was never written
            del self.steps[number]

    def _end(self, frame: End) -> None:
        self.now = max(self.now, frame.when)
        seen = self.requests.pop(frame.number, None)
        if seen is None:
            return
        self._turn(seen, State.ENDED, frame.when)
        seen.ended = frame
        if seen.lane != NO_LANE:
            # the request keeps its lane's number
            self.lanes[seen.lane] = 0
        self._on_ended(seen)

    def _keyframe(self, frame: Keyframe) -> None:
        told = {lane.number: lane for lane in frame.lanes}
        if self.synced and not frame.reset:
            for lane in frame.lanes:
                seen = self.requests.get(lane.number)
                if seen is None or seen.lane != lane.lane:
                    self.num_doubts += 1
                else:
                    seen.computed = lane.computed
            return
        self.synced = True
        self.now = max(self.now, frame.now)
        self.lanes = []
        for number, seen in self.requests.items():
            if number not in told and seen.lane != NO_LANE:
                self._turn(seen, State.WAIT, frame.now)
                seen.lane = NO_LANE
        for lane in frame.lanes:
            seen = self.requests.setdefault(lane.number, Seen(lane.number))
            state = State(lane.state) if lane.state < len(State) else State.DECODE
            if not seen.spans and lane.preemptions:
                # it ran before this reader began, and that part is unknown
                seen.state, seen.since = state, lane.since
            else:
                self._turn(seen, state, lane.since if lane.since > seen.since else frame.now)
            seen.lane, seen.demoted = lane.lane, lane.demoted
            seen.computed, seen.preemptions = lane.computed, lane.preemptions
            seen.waited = lane.waited
            if lane.lane != NO_LANE:
                self._put(lane.lane, lane.number)

    def _told(self, frame: Told) -> None:
        if frame.type is FrameType.START:
            self.requests.clear()
            self.steps.clear()
            self.held, self.num_held = [], 0
            self.lanes, self.step, self._done = [], -1, -math.inf
            # one that began earlier: running requests are in the keyframe that follows
            self.start, self.synced = frame.told, not frame.told.get("goes_on")
        elif frame.type is FrameType.HELLO:
            self.hello = frame.told
        elif frame.type is FrameType.GAUGES:
            self.gauges = frame.told
        elif frame.type is FrameType.GAP:
            self.gaps.append(frame.told)
            # the state in between is unknown
            self.synced = False
        elif frame.type is FrameType.DOOR:
            self._door(frame.told)
        else:
            self.notices.append(frame.told)

    def _door(self, told: Mapping[str, Any]) -> None:
        held, refused = told.get("held"), told.get("refused")
        num_held, num_refused = told.get("num_held"), told.get("num_refused")
        self.held = held if isinstance(held, list) else []
        self.num_held = num_held if isinstance(num_held, int) else len(self.held)
        self.refused += refused if isinstance(refused, list) else []
        self.num_refused += num_refused if isinstance(num_refused, int) else 0

    # ------------------------------------------------------------------ inside

    def _at(self, lane: int) -> Seen | None:
        number = self.lanes[lane] if lane < len(self.lanes) else 0
        return self.requests.get(number)

    def _put(self, lane: int, number: int) -> None:
        if lane >= len(self.lanes):
            self.lanes += [0] * (lane + 1 - len(self.lanes))
        self.lanes[lane] = number

    def _admit(self, event: Event, now: float) -> None:
        before = self._at(event.lane)
        if before is not None:
            self.num_doubts += 1
            before.lane = NO_LANE
        seen = self.requests.get(event.value)
        if seen is None:
            # it ended after the plan was made
            return
        if seen.lane != NO_LANE:
            self.lanes[seen.lane] = 0
        self._turn(seen, State.DECODE, now)
        seen.lane = event.lane
        seen.computed = 0
        self._put(event.lane, event.value)

    def _held(self, seen: Seen, seconds: float) -> None:
        """Mark the first ``seconds`` of the wait that has just ended as for its parent's prompt."""
        if not seen.spans or seen.spans[-1].state not in (State.WAIT, State.HELD):
            return
        last = seen.spans.pop()
        until = min(last.end, last.start + seconds)
        seen.spans.append(last._replace(state=State.HELD, end=until))
        seen.spans.append(last._replace(state=State.WAIT, start=until))
        seen.waited += last.end - until if last.state is State.HELD else last.start - until

    def _turn(self, seen: Seen, state: State, now: float) -> None:
        """Change a request's state; a chunk that goes on is the same state."""
        if seen.state is state:
            return
        if seen.state in _WAITS:
            seen.waited += max(0.0, now - seen.since)
        end = max(now, seen.since)
        lane = seen.lane if seen.state in _RUNS else NO_LANE
        if end > seen.since or seen.steps:
            seen.spans.append(Span(seen.state, seen.since, end, lane, seen.steps, seen.tokens))
        seen.state, seen.since = state, now
        seen.steps = seen.tokens = 0
