"""The timeline's recent past, in memory, and those who follow it.

::

    engine ==frames==> Feed.take --> segments of two seconds, the oldest of which go
                                 \\-> a bounded queue for each viewer --> its stream

Frames are kept as the bytes that they came as; only their headers are looked at. A segment begins
with a keyframe, so a viewer can begin at any: it is first sent the announcements of the requests
that lived then. A viewer that does not keep up loses what waits for it, is told so (GAP), and goes
on at the newest keyframe; it costs the engine nothing and this process a bounded queue.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.engine.protocol import EngineClient
from paceline.engine.timeline.codec import HEADER, encode, headers
from paceline.engine.timeline.events import FrameType, Told, vocabulary

__all__ = ["MOST_VIEWERS", "Feed", "TooManyViewersError"]

MOST_VIEWERS: Final = 8
# messages that may wait for a viewer: some three seconds of a busy engine
_MOST_WAITING: Final = 64
# seconds between gauges, of a live engine and in what is kept
_GAUGES: Final = 1.0
_START: Final = bytes((FrameType.START,))
_FIRST_U32: Final = struct.Struct("<I")


class TooManyViewersError(PacelineError):
    """All places of those who follow are taken."""


@dataclass(slots=True)
class _Segment:
    number: int
    # of engines, and the first step that is told
    epoch: int
    step: int
    # seconds, monotonic
    began: float
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Announced:
    frame: bytes
    epoch: int
    # numbers of the segments in which it was told, and in which it ended
    segment: int
    ended: int | None = None


@dataclass(slots=True, eq=False)
class _Viewer:
    waiting: deque[bytes] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    # what waited was dropped
    behind: bool = False


class Feed:
    """Made once for an app, on the event loop that ``client`` speaks on.

    Args:
        most_bytes: of frames that are kept, beside their announcements.
        clock: seconds, monotonic: the engine's.
    """

    def __init__(
        self,
        client: EngineClient,
        most_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._most = most_bytes
        self._clock = clock
        self._epoch = 0
        self._step = 0
        self._segments: deque[_Segment] = deque()
        self._size = 0
        self._announced: dict[tuple[int, int], _Announced] = {}
        self._viewers: set[_Viewer] = set()
        self._gauged_at = -_GAUGES
        self._level = 0
        # what was before is not known, and there was nothing
        self._begin()
        self._segments[-1].data += self._start()
        before = client.on_timeline

        def on_timeline(frames: bytes | None) -> None:
            if before is not None:
                before(frames)
            self.take(frames)

        client.on_timeline = on_timeline

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def num_bytes(self) -> int:
        """Of frames that are kept."""
        return self._size + len(self._segments[-1].data)

    @property
    def num_requests(self) -> int:
        """Of those that the frames that are kept tell of."""
        return len(self._announced)

    @property
    def seconds(self) -> float:
        """How long ago the oldest of what is kept was."""
        return self._clock() - self._segments[0].began

    # ------------------------------------------------------------------ from the engine

    def take(self, frames: bytes | None) -> None:
        """Whole frames, or None: the engine is gone."""
        if frames is None:
            frames = _told(FrameType.NOTICE, kind="engine_lost", now=self._clock())
            self._end_all()
            self._segments[-1].data += frames
        else:
            self._keep(frames)
            now = self._clock()
            if now - self._gauged_at >= _GAUGES:
                self._gauged_at = now
                gauges = self._gauges()
                self._segments[-1].data += gauges
                frames += gauges
        self._forget()
        for viewer in self._viewers:
            if len(viewer.waiting) >= _MOST_WAITING:
                viewer.waiting.clear()
                viewer.behind = True
            if not viewer.behind:
                viewer.waiting.append(frames)
            viewer.news.set()

    def _keep(self, frames: bytes) -> None:
        done = 0
        for kind, start, end in headers(frames):
            at = start + HEADER.size
            if kind == FrameType.PLAN:
                self._step = _FIRST_U32.unpack_from(frames, at)[0]
            elif kind == FrameType.ANNOUNCE:
                number = _FIRST_U32.unpack_from(frames, at)[0]
                self._announced[self._epoch, number] = _Announced(
                    frames[start:end], self._epoch, self._segments[-1].number
                )
            elif kind == FrameType.END:
                number = _FIRST_U32.unpack_from(frames, at)[0]
                announced = self._announced.get((self._epoch, number))
                if announced is not None:
                    announced.ended = self._segments[-1].number
            elif kind in (FrameType.KEYFRAME, FrameType.START):
                self._segments[-1].data += frames[done:start]
                done = start
                if kind == FrameType.START:
                    self._end_all()
                    self._epoch, self._step = self._epoch + 1, 0
                self._begin()
        self._segments[-1].data += frames[done:]

    def _begin(self) -> None:
        number = 0
        if self._segments:
            last = self._segments[-1]
            number = last.number + 1
            self._size += len(last.data)
        self._segments.append(_Segment(number, self._epoch, self._step, self._clock()))

    def _end_all(self) -> None:
        """The requests of an engine that is gone are over."""
        number = self._segments[-1].number
        for announced in self._announced.values():
            if announced.ended is None:
                announced.ended = number

    def _forget(self) -> None:
        if self.num_bytes <= self._most:
            return
        last = self._segments[-1]
        if len(last.data) > self._most:
            # without a keyframe for so long, nothing could begin within it
            last.data[:] = _told(
                FrameType.GAP, **{"from": last.step, "to": self._step, "why": "history"}
            )
        while self.num_bytes > self._most and len(self._segments) > 1:
            self._size -= len(self._segments.popleft().data)
        oldest = self._segments[0].number
        gone = [k for k, a in self._announced.items() if a.ended is not None and a.ended < oldest]
        for key in gone:
            del self._announced[key]

    # ------------------------------------------------------------------ to viewers

    def history(self, *, since: tuple[int, int] | None = None, seconds: float = 60.0) -> bytes:
        """Frames from a keyframe on: that before step ``since`` = (engine, step), or that of so
        many ``seconds`` ago."""
        first = self._segments[0]
        begin, gap = first, b""
        if since is None:
            oldest = self._clock() - seconds
            for segment in self._segments:
                if segment.began <= oldest:
                    begin = segment
        else:
            for segment in self._segments:
                if (segment.epoch, segment.step) <= since:
                    begin = segment
            if begin is first and (first.epoch, first.step) > since:
                told = {"from": since[1], "to": first.step, "why": "history"}
                gap = _told(FrameType.GAP, **told)
        return self._hello(begin) + gap + self._from(begin)

    def follow(
        self,
        *,
        since: tuple[int, int] | None,
        seconds: float,
        ends: Callable[[], bool],
        drains: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[bytes]:
        """The same, and then what comes, until ``ends()``; gauges each second at least, and once
        that ``drains()``.

        Raises:
            TooManyViewersError: all places are taken.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            raise TooManyViewersError(
                f"{MOST_VIEWERS} pages follow the timeline already; ask without follow=1 instead"
            )
        return self._stream(since, seconds, ends, drains)

    async def _stream(
        self,
        since: tuple[int, int] | None,
        seconds: float,
        ends: Callable[[], bool],
        drains: Callable[[], bool],
    ) -> AsyncIterator[bytes]:
        viewer = _Viewer()
        # at once with the history, so that nothing comes between
        self._viewers.add(viewer)
        try:
            yield self.history(since=since, seconds=seconds)
            seen, told_of_end = (self._epoch, self._step), False
            while not ends():
                if drains() and not told_of_end:
                    told_of_end = True
                    yield _told(FrameType.NOTICE, kind="draining", now=self._clock())
                try:
                    async with asyncio.timeout(_GAUGES):
                        await viewer.news.wait()
                except TimeoutError:
                    yield self._gauges()
                    continue
                viewer.news.clear()
                if viewer.behind:
                    viewer.waiting.clear()
                    viewer.behind = False
                    last = self._segments[-1]
                    told = {"from": seen[1], "to": last.step, "why": "slow viewer"}
                    yield _told(FrameType.GAP, **told) + self._from(last)
                else:
                    frames = b"".join(viewer.waiting)
                    viewer.waiting.clear()
                    yield frames
                seen = (self._epoch, self._step)
            if not told_of_end:
                yield _told(FrameType.NOTICE, kind="draining", now=self._clock())
        finally:
            self._viewers.discard(viewer)

    def _from(self, begin: _Segment) -> bytes:
        parts = [
            announced.frame
            for announced in self._announced.values()
            if announced.epoch == begin.epoch
            and announced.segment < begin.number
            and (announced.ended is None or announced.ended >= begin.number)
        ]
        parts += [bytes(s.data) for s in self._segments if s.number >= begin.number]
        return b"".join(parts)

    # ------------------------------------------------------------------ frames of its own

    def _start(self) -> bytes:
        info = self._client.info
        return _told(
            FrameType.START,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            policy=info.policy,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            num_host_blocks=self._client.stats.scheduler.num_host_blocks,
        )

    def _hello(self, begin: _Segment) -> bytes:
        info, first = self._client.info, self._segments[0]
        return _told(
            FrameType.HELLO,
            **vocabulary(),
            engine=self._epoch,
            # that of what follows, until a START says that the next one begins
            first=begin.epoch - begin.data.startswith(_START),
            now=self._clock(),
            # added to a time of the engine's clock, it is seconds since 1970
            unix=time.time() - self._clock(),
            oldest={"engine": first.epoch, "step": first.step, "time": first.began},
            model=info.model,
            backend=info.backend,
        )

    def _gauges(self) -> bytes:
        stats = self._client.stats
        scheduler = stats.scheduler
        return _told(
            FrameType.GAUGES,
            now=self._clock(),
            engine=self._epoch,
            up=self._client.faults.up,
            step=self._step,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            held_by=scheduler.held_by,
            pressure=scheduler.pressure_level,
            blocks=scheduler.num_blocks,
            free=scheduler.num_free_blocks,
            cached=scheduler.num_cached_free_blocks,
            host=scheduler.num_host_blocks,
            host_free=scheduler.num_free_host_blocks,
            preemptions=scheduler.num_preemptions,
            classes=[list(use) for use in stats.classes],
        )


def _told(kind: FrameType, /, **told: Any) -> bytes:
    return encode(Told(kind, told))
