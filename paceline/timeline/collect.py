"""The timeline of a run in one process, as it is written: its frames, or the model they rebuild.

This module does not know what runs the steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepNote
from paceline.core.request import Request
from paceline.timeline.chrome import MOST_SLICES, trace_of
from paceline.timeline.codec import Decoder
from paceline.timeline.model import Model, Seen, Step
from paceline.timeline.tap import TimelineTap

__all__ = ["Collector", "Frames"]

# bytes that the tap collects before they are passed on
_ENOUGH: Final = 65536


class Frames:
    """A ``Recorder`` that passes on a tap's frames, in pieces of whole frames.

    Args:
        take: called with each piece.
        most: bytes after which no more is written; the last piece may exceed it.
        enough: bytes that are collected before a piece is passed on; 0: each step is one.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        take: Callable[[bytes], object],
        *,
        most: float = math.inf,
        enough: int = _ENOUGH,
    ) -> None:
        # a clock that stands still, as the cost does not matter here
        self._tap = TimelineTap(scheduler, cache, clock=lambda: 0.0)
        self._take = take
        self._left, self._enough = most, enough
        # time at which the last step that is written was done
        self.until = 0.0

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    def added(self, request: Request, now: float) -> None:
        if not self.is_full:
            self._tap.added(request, now)

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        if not self.is_full:
            self._tap.planned(plan, now, note)

    def stepped(
        self,
        plan: SchedulerOutput,
        planned: float,
        done: float,
        seconds: float,
        updates: Sequence[RequestUpdate],
    ) -> None:
        if self.is_full:
            return
        self._tap.stepped(plan, planned, done, seconds, updates)
        self.until = done
        if self._tap.num_bytes >= self._enough:
            self.close()

    def ended(self, request_ids: Sequence[str], now: float) -> None:
        if not self.is_full:
            self._tap.ended(request_ids, now)

    def close(self) -> None:
        """Pass on the bytes that the tap still holds. More may follow."""
        data = self._tap.take(0.0, idle=True)
        self._left -= len(data)
        self._take(data)


class Collector(Frames):
    """A ``Recorder``, and the model that its frames rebuild. Keeps the newest steps and requests,
    as many as a trace may show."""

    def __init__(self, scheduler: SchedulerConfig, cache: CacheConfig) -> None:
        super().__init__(scheduler, cache, self._read)
        self._decoder = Decoder()
        self._steps: deque[Step] = deque(maxlen=MOST_SLICES)
        self._ended: deque[Seen] = deque(maxlen=MOST_SLICES)
        self.model = Model(self._steps.append, self._ended.append)

    def trace(self) -> dict[str, Any]:
        """Return the run so far as a trace, see ``chrome.trace_of``."""
        self.close()
        alive = self.model.requests.values()
        return trace_of(list(self._steps), [*self._ended, *alive], now=self.model.now)

    def _read(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self.model.take(frame)
