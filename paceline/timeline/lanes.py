"""The lanes of running requests, and the state last written of each.

This module does not know plans or bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

from paceline.core.request import Request, RequestStatus
from paceline.timeline.events import NO_LANE, Event, Kind, LaneState, State

__all__ = ["Entry", "Lanes"]

# looked up once: a member of an enum takes longer to reach than a name of the module
_RUNNING: Final = RequestStatus.RUNNING
_WAIT, _DECODE, _SKIPPED = State.WAIT, State.DECODE, State.SKIPPED
_PREEMPTED, _SWAPPED = State.PREEMPTED, State.SWAPPED
# plain numbers, which are packed faster
_ADMIT, _HELD, _NARROW, _SKIP = map(int, (Kind.ADMIT, Kind.HELD, Kind.NARROW, Kind.SKIP))
_PREEMPT, _SWAP, _EARLIER = map(int, (Kind.PREEMPT, Kind.SWAP, Kind.EARLIER))
_DEMOTE, _PROMOTE = int(Kind.DEMOTE), int(Kind.PROMOTE)


class Entry:
    """A request that has not ended."""

    __slots__ = ("demoted", "lane", "mode", "number", "paused", "request", "since")

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.lane = NO_LANE
        # state of its lane, as last written
        self.mode = _DECODE
        # PREEMPTED or SWAPPED while it waits again; WAIT: it never ran
        self.paused = _WAIT
        self.demoted = False
        # time of its admission or preemption
        self.since = 0.0

    def state(self) -> LaneState:
        request = self.request
        return LaneState(
            self.number,
            self.lane,
            self.paused if self.lane == NO_LANE else self.mode,
            self.demoted,
            request.num_computed_tokens,
            request.num_preemptions,
            sum(request.history.waits),
            self.since,
        )


class Lanes:
    """Gives a request the lowest free lane, until it ends or is preempted."""

    def __init__(self) -> None:
        # by lane; None: free
        self._by_lane: list[Entry | None] = []
        self._free: list[int] = []
        self.num_running = 0
        # entries last written in a mode other than DECODE, and entries whose targets were given up
        # (in order of that change, so that equal runs write equal bytes)
        self.odd: dict[Entry, None] = {}
        self.demoted: dict[Entry, None] = {}

    def running(self) -> list[Entry]:
        """Return entries in lane order."""
        return [entry for entry in self._by_lane if entry is not None]

    def admit(self, entry: Entry, now: float, events: list[Event]) -> None:
        """Give a lane to a request that runs from this plan on."""
        lane = self._give(entry)
        entry.since = now
        events.append(Event(lane, _ADMIT, entry.number))
        request = entry.request
        if entry.paused is _WAIT and request.asked.fork_of is not None:
            held = max(0.0, request.history.waiting_since - request.asked.arrival_time)
            events.append(Event(lane, _HELD, _microseconds(held)))
        if request.history.demoted != entry.demoted:
            self.turn_target(entry, events)
        elif entry.demoted:
            self.demoted[entry] = None

    def preempt(self, entry: Entry, now: float, events: list[Event]) -> None:
        """Take the lane of a preempted request."""
        request = entry.request
        swapped = request.num_swapped_tokens
        since = request.history.waiting_since
        if since < now:
            events.append(Event(entry.lane, _EARLIER, _microseconds(now - since)))
        if swapped:
            events.append(Event(entry.lane, _SWAP, swapped))
        else:
            events.append(Event(entry.lane, _PREEMPT, request.history.num_lost_tokens))
        entry.paused = _SWAPPED if swapped else _PREEMPTED
        entry.since = since
        self.leave(entry)

    def leave(self, entry: Entry) -> None:
        """Free its lane, if it has one."""
        if entry.lane == NO_LANE:
            return
        self._by_lane[entry.lane] = None
        heapq.heappush(self._free, entry.lane)
        entry.lane = NO_LANE
        self.num_running -= 1
        self.odd.pop(entry, None)
        self.demoted.pop(entry, None)

    def turn_target(self, entry: Entry, events: list[Event]) -> None:
        """Write the change of a running request's targets."""
        entry.demoted = entry.request.history.demoted
        if entry.demoted:
            self.demoted[entry] = None
        else:
            self.demoted.pop(entry, None)
        events.append(Event(entry.lane, _DEMOTE if entry.demoted else _PROMOTE))

    def restored(self, events: list[Event]) -> None:
        """Write the entries whose targets are aimed at again."""
        for entry in tuple(self.demoted):
            if not entry.request.history.demoted:
                self.turn_target(entry, events)

    def skip(self, served: set[str], events: list[Event]) -> None:
        """Write which running requests are not among ``served`` in this step."""
        for entry in self._by_lane:
            if entry is not None and entry.request.request_id not in served:
                if entry.mode is not _SKIPPED:
                    entry.mode = _SKIPPED
                    events.append(Event(entry.lane, _SKIP))
                self.odd[entry] = None

    def narrow(self, before: Iterable[Entry], events: list[Event]) -> None:
        """Write which of the entries in another mode before this step compute one token now."""
        for entry in before:
            if entry not in self.odd and entry.lane != NO_LANE and entry.mode is not _DECODE:
                entry.mode = _DECODE
                events.append(Event(entry.lane, _NARROW))

    def find(self, entries: Iterable[Entry], now: float) -> None:
        """Update lanes from the requests, after steps that were not followed."""
        for entry in entries:
            request = entry.request
            runs = request.status is _RUNNING
            if entry.lane != NO_LANE and not runs:
                self.leave(entry)
                entry.since = now
                entry.paused = _SWAPPED if request.num_swapped_tokens else _PREEMPTED
            elif entry.lane == NO_LANE and runs:
                self._give(entry)
                entry.since = request.first_scheduled_time or now
            entry.demoted = request.history.demoted
        self.demoted = {entry: None for entry in self.running() if entry.demoted}

    def _give(self, entry: Entry) -> int:
        if self._free:
            lane = heapq.heappop(self._free)
            self._by_lane[lane] = entry
        else:
            lane = len(self._by_lane)
            self._by_lane.append(entry)
        entry.lane, entry.mode = lane, _DECODE
        self.num_running += 1
        return lane


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
