"""A timeline that is read as it is told, for whoever wants a whole run in one process.

This module does not know who runs the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepNote
from paceline.core.request import Request
from paceline.engine.timeline.chrome import MOST_SLICES, trace_of
from paceline.engine.timeline.codec import Decoder
from paceline.engine.timeline.model import Model, Seen, Step
from paceline.engine.timeline.tap import TimelineTap

__all__ = ["Collector"]

# bytes that wait to be read
_ENOUGH = 65536


class Collector:
    """A ``Recorder``: a tap and the model that its frames rebuild. Keeps the newest steps and
    requests, as many as a trace may show.

    Args:
        keep_frames: keep the bytes too.
    """

    def __init__(
        self, scheduler: SchedulerConfig, cache: CacheConfig, *, keep_frames: bool = False
    ) -> None:
        # what it takes is nobody's time
        self._tap = TimelineTap(scheduler, cache, clock=lambda: 0.0)
        self._decoder = Decoder()
        self._steps: deque[Step] = deque(maxlen=MOST_SLICES)
        self._ended: deque[Seen] = deque(maxlen=MOST_SLICES)
        self.model = Model(self._steps.append, self._ended.append)
        self._keeps = keep_frames
        self.frames = bytearray()

    def added(self, request: Request, now: float) -> None:
        self._tap.added(request, now)

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        self._tap.planned(plan, now, note)

    def stepped(
        self,
        plan: SchedulerOutput,
        planned: float,
        done: float,
        seconds: float,
        updates: Sequence[RequestUpdate],
    ) -> None:
        self._tap.stepped(plan, planned, done, seconds, updates)
        if self._tap.num_bytes >= _ENOUGH:
            self._read()

    def ended(self, request_ids: Sequence[str], now: float) -> None:
        self._tap.ended(request_ids, now)

    def close(self) -> None:
        self._read()

    def trace(self) -> dict[str, Any]:
        """See ``chrome.trace_of``."""
        self._read()
        alive = self.model.requests.values()
        return trace_of(list(self._steps), [*self._ended, *alive], now=self.model.now)

    def _read(self) -> None:
        data = self._tap.take(0.0, idle=True)
        if self._keeps:
            self.frames += data
        for frame in self._decoder.feed(data):
            self.model.take(frame)
