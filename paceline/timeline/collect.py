"""A timeline that is read as it is written, to get a whole run in one process.

This module does not know what runs the steps.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.timeline.chrome import MOST_SLICES, trace_of
from paceline.timeline.codec import Decoder
from paceline.timeline.frames import Frames
from paceline.timeline.model import Model, Seen, Step

__all__ = ["Collector"]


class Collector(Frames):
    """A ``Recorder``, and the model that its frames rebuild. Keeps the newest steps and requests,
    as many as a trace may show.

    Args:
        keep_frames: keep the bytes, too.
    """

    def __init__(
        self, scheduler: SchedulerConfig, cache: CacheConfig, *, keep_frames: bool = False
    ) -> None:
        super().__init__(scheduler, cache, self._read)
        self._decoder = Decoder()
        self._steps: deque[Step] = deque(maxlen=MOST_SLICES)
        self._ended: deque[Seen] = deque(maxlen=MOST_SLICES)
        self.model = Model(self._steps.append, self._ended.append)
        self._keeps = keep_frames
        self.frames = bytearray()

    def trace(self) -> dict[str, Any]:
        """Return the run so far as a trace, see ``chrome.trace_of``."""
        self.close()
        alive = self.model.requests.values()
        return trace_of(list(self._steps), [*self._ended, *alive], now=self.model.now)

    def _read(self, data: bytes) -> None:
        if self._keeps:
            self.frames += data
        for frame in self._decoder.feed(data):
            self.model.take(frame)
