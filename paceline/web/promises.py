"""The page's view of promises: one frame for each period of time, by the arithmetic of ``paceline
top``, and points of the last hour.

Readings are taken on request, at most one a second, and shared by all viewers. So an unwatched
server does no work for this, and its first viewer sees the time since the start but not the last
minute. Imported when the page first requests it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final, Protocol

from paceline.http.errors import HttpError
from paceline.http.fields import show
from paceline.server.observability.snapshot.frame import Frame, make_frame
from paceline.server.observability.snapshot.scrape import Scrape

__all__ = ["WINDOWS", "Promises", "Readable", "window_of"]

# periods that can be requested, in seconds; 0: since start
WINDOWS: Final = (60, 600, 0)
# seconds between readings kept for the last minute, and for the last ten minutes
_FINE: Final = 5.0
_COARSE: Final = 60.0
# age of the oldest point, in seconds; there is one point per kept reading
_HOUR: Final = 3600.0
# seconds for which a reading is reused
_SHARED: Final = 1.0
# seconds without requests after which older readings do not describe the last minute
_STALE: Final = 90.0
# maximum tenants shown, in order of tokens
_TENANTS: Final = 50


def window_of(query: Mapping[str, str]) -> int:
    """Return the period that a query's ``seconds`` ask for. Raises HttpError."""
    value = query.get("seconds", "60")
    if value not in map(str, WINDOWS):
        known = ", ".join(map(str, WINDOWS))
        raise HttpError(400, f"seconds must be one of {known} (0: since start), got {show(value)}")
    return int(value)


class Readable(Protocol):
    """The part of ``ServerMetrics`` that is used here."""

    def read(self) -> Scrape: ...

    def at_start(self) -> Scrape: ...


class Promises:
    """The promises that the page shows, made once for an app. Used from the event loop's thread.

    Args:
        clock: the clock of the readings, in seconds.
    """

    def __init__(self, metrics: Readable, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start = metrics.at_start()
        # the newest reading, and the frames made from it, by window
        self._now: Scrape | None = None
        self._frames: dict[int, dict[str, Any]] = {}
        self._fine: deque[Scrape] = deque(maxlen=int(WINDOWS[0] / _FINE) + 1)
        self._coarse: deque[Scrape] = deque(maxlen=int(WINDOWS[1] / _COARSE) + 1)
        # (time, values)
        self._points: deque[tuple[float, dict[str, Any]]] = deque()

    def tell(self, window: int) -> dict[str, Any]:
        """Return as JSON the frame of the last ``window`` seconds, or of the watched part of them,
        and the points of the last hour; times are seconds before now."""
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
        """Return the last reading if it is recent enough to share, or a new one."""
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
        """Return the newest reading at least ``window`` old; else the oldest; else the start."""
        if window == 0:
            return self._start
        kept = self._fine if window <= WINDOWS[0] else self._coarse
        found = None
        for reading in kept:
            if found is None or now.time - reading.time >= window:
                found = reading
        # a reading taken just now spans no time
        return self._start if found is None or found.time >= now.time else found


def _point(frame: Frame) -> dict[str, Any]:
    """Return the values that the charts show for a minute."""
    return {
        "goodput": frame.goodput_per_s,
        "attainment": frame.attainment,
        "ttft_p99": frame.ttft.p99,
        "step_error": frame.step_error,
    }
