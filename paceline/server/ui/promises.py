"""What the page says of promises: one frame for each stretch of time, by the arithmetic of
``paceline top``, and how the last hour went.

Readings are taken when somebody asks, one a second at most, which all who ask then share. So a
server that nobody watches does nothing for this, and the first who looks finds what was since the
start and nothing of the last minute. Imported when the page is first asked for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final, Protocol

from paceline.server.readings import Frame, Scrape, make_frame

__all__ = ["WINDOWS", "Promises", "Readable"]

# stretches of time that can be asked for, in seconds; 0: since start
WINDOWS: Final = (60, 600, 0)
# seconds between readings that are kept for the last minute, and for those ten
_FINE: Final = 5.0
_COARSE: Final = 60.0
# of the points that are told, in seconds; one for each reading that was kept
_HOUR: Final = 3600.0
# seconds for which a reading is what is asked for now
_SHARED: Final = 1.0
# nobody asked for so long: what was read before says nothing of the last minute
_STALE: Final = 90.0
# tenants that are told; those with the most tokens come first
_TENANTS: Final = 50


class Readable(Protocol):
    """``ServerMetrics``, as far as it matters here."""

    def read(self) -> Scrape: ...

    def at_start(self) -> Scrape: ...


class Promises:
    """Made once for an app. Used from the event loop's thread.

    Args:
        clock: seconds, that of the readings.
    """

    def __init__(self, metrics: Readable, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start = metrics.at_start()
        # the newest, and the frames that were made of it, by window
        self._now: Scrape | None = None
        self._frames: dict[int, dict[str, Any]] = {}
        self._fine: deque[Scrape] = deque(maxlen=int(WINDOWS[0] / _FINE) + 1)
        self._coarse: deque[Scrape] = deque(maxlen=int(WINDOWS[1] / _COARSE) + 1)
        # when, and what
        self._points: deque[tuple[float, dict[str, Any]]] = deque()

    def tell(self, window: int) -> dict[str, Any]:
        """As JSON: the frame of the last ``window`` seconds, or of as many as were watched, and the
        points of the last hour; times are seconds before now."""
        now = self._clock()
        reading = self._reading(now)
        now = max(now, reading.time)
        told = self._frames.get(window)
        if told is None:
            frame = make_frame(self._before(reading, window), reading)
            told = self._frames[window] = {
                "frame": asdict(replace(frame, tenants=frame.tenants[:_TENANTS])),
                "window": window,
                "tenants_left_out": max(0, len(frame.tenants) - _TENANTS),
            }
        while self._points and now - self._points[0][0] >= _HOUR:
            self._points.popleft()
        return told | {
            "uptime": now - self._start.time,
            "points": [{"ago": round(now - at, 1), **point} for at, point in self._points],
        }

    def _reading(self, now: float) -> Scrape:
        """The one that was taken just now, for whoever else asked, or a new one."""
        if self._now is None or not 0.0 <= now - self._now.time < _SHARED:
            self._now = self._metrics.read()
            self._frames.clear()
            self._keep(self._now)
        return self._now

    def _keep(self, now: Scrape) -> None:
        if self._fine and now.time - self._fine[-1].time > _STALE:
            self._fine.clear()
            self._coarse.clear()
        if not self._fine or now.time - self._fine[-1].time >= _FINE:
            if self._fine:
                frame = make_frame(self._fine[0], now)
                self._points.append((now.time, _point(frame)))
            self._fine.append(now)
        if not self._coarse or now.time - self._coarse[-1].time >= _COARSE:
            self._coarse.append(now)

    def _before(self, now: Scrape, window: int) -> Scrape:
        """The newest reading that is so old; else the oldest there is; else the start."""
        if window == 0:
            return self._start
        kept = self._fine if window <= WINDOWS[0] else self._coarse
        found = None
        for reading in kept:
            if found is None or now.time - reading.time >= window:
                found = reading
        # a reading that was taken just now has nothing between itself and now
        return self._start if found is None or found.time >= now.time else found


def _point(frame: Frame) -> dict[str, Any]:
    """What the charts show of a minute."""
    return {
        "goodput": frame.goodput_per_s,
        "attainment": frame.attainment,
        "ttft_p99": frame.ttft.p99,
        "step_error": frame.step_error,
    }
