"""The timeline's recent past, in memory, and the viewers that follow it.

::

    engine ==frames==> Feed.take --> segments of two seconds; the oldest are dropped
                                 \\-> a bounded queue for each viewer --> its stream

Frames are kept as the received bytes; only their headers are read. A segment begins with a
keyframe, so a viewer can begin at any segment: it first gets the engine (START) and the
announcements of requests that were alive then. A viewer that does not keep up loses its bounded
queue, gets a GAP, and continues at the newest keyframe; the engine does no work for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakSet

from paceline.engine.protocol import EngineClient
from paceline.errors import PacelineError
from paceline.timeline.codec import HEADER, encode, headers, number_in
from paceline.timeline.events import FrameType, Told, vocabulary

__all__ = ["MOST_VIEWERS", "Feed", "TooManyViewersError"]

MOST_VIEWERS: Final = 8
# maximum messages queued for a viewer, about three seconds of a busy engine, and their bytes
# without the newest
_MOST_WAITING: Final = 64
_MOST_WAITING_BYTES: Final = 256 * 1024
# bytes of an announcement in addition to its frame
_ENTRY: Final = 256
# seconds between gauges, for a live engine and in the history
_GAUGES: Final = 1.0
_START: Final = bytes((FrameType.START,))


class TooManyViewersError(PacelineError):
    """The maximum number of viewers is reached."""


@dataclass(slots=True)
class _Segment:
    number: int
    # number of the engine, and the first step recorded
    epoch: int
    step: int
    # seconds, monotonic
    began: float
    # content of its engine's START
    start: Mapping[str, Any]
    data: bytearray = field(default_factory=bytearray)
    # requests that begin and end in it
    num_whole: int = 0
    # first step lost before this segment, in the middle of a keyframe's stretch; such a segment
    # does not begin with a keyframe
    lost_from: int | None = None


@dataclass(slots=True)
class _Announced:
    frame: bytes
    epoch: int
    # numbers of the segments in which the request was announced, and in which it ended
    segment: int
    ended: int | None = None


@dataclass(eq=False)
class _Viewer:
    """Holds a slot from its request until its stream ends, or until it is dropped unread."""

    waiting: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    # the queue was dropped
    behind: bool = False

    def tell(self, frames: bytes) -> None:
        full = self.waiting and self.num_bytes + len(frames) > _MOST_WAITING_BYTES
        if full or len(self.waiting) >= _MOST_WAITING:
            self.take()
            self.behind = True
        if not self.behind:
            self.waiting.append(frames)
            self.num_bytes += len(frames)
        self.news.set()

    def take(self) -> bytes:
        frames = b"".join(self.waiting)
        self.waiting.clear()
        self.num_bytes = 0
        return frames


class Feed:
    """The timeline of an app, made once, on the event loop that calls ``client``'s listeners.

    Args:
        most_bytes: limit of kept frames, including announcements that viewers get again. These take
            at most half of it: beyond that the oldest are forgotten, and a page opened later knows
            those requests only by number.
        clock: the engine's clock; seconds, monotonic.
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
        # tells this server from an earlier one at the same address, which counted engines too
        self._server = round(1e3 * time.time())
        self._epoch = 0
        self._step = 0
        self._segments: deque[_Segment] = deque()
        self._size = 0
        self._announced: dict[tuple[int, int], _Announced] = {}
        self._announced_size = 0
        self._viewers: WeakSet[_Viewer] = WeakSet()
        self._gauged_at = -_GAUGES
        self._level = 0
        # an empty history: the past is unknown
        start = self._start()
        self._begin(start)
        self._segments[-1].data += _told(FrameType.START, **start)
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
        """Bytes kept: frames and announcements."""
        return self._size + len(self._segments[-1].data) + self._announced_size

    @property
    def num_requests(self) -> int:
        """Number of requests in the kept frames."""
        return len(self._announced) + sum(segment.num_whole for segment in self._segments)

    @property
    def seconds(self) -> float:
        """Age of the oldest kept segment, in seconds."""
        return self._clock() - self._segments[0].began

    # ------------------------------------------------------------------ from the engine

    def take(self, frames: bytes | None) -> None:
        """Take in whole frames, or None when the engine is gone."""
        if frames is None:
            frames = _told(FrameType.NOTICE, kind="engine_failed", now=self._clock())
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
            viewer.tell(frames)

    def _keep(self, frames: bytes) -> None:
        done = 0
        for kind, start, end in headers(frames):
            if kind == FrameType.PLAN:
                self._step = number_in(frames[start:end])
            elif kind == FrameType.ANNOUNCE:
                number = number_in(frames[start:end])
                if (self._epoch, number) in self._announced:
                    self._drop((self._epoch, number))
                self._announced[self._epoch, number] = _Announced(
                    frames[start:end], self._epoch, self._segments[-1].number
                )
                self._announced_size += end - start + _ENTRY
            elif kind == FrameType.END:
                number = number_in(frames[start:end])
                announced = self._announced.get((self._epoch, number))
                if announced is not None:
                    announced.ended = self._segments[-1].number
                    if announced.segment == announced.ended:
                        # a reader sees the start of a request before its end
                        self._drop((self._epoch, number))
                        self._segments[-1].num_whole += 1
            elif kind in (FrameType.KEYFRAME, FrameType.START):
                self._segments[-1].data += frames[done:start]
                done = start
                told = self._segments[-1].start
                if kind == FrameType.START:
                    self._end_all()
                    self._epoch, self._step = self._epoch + 1, 0
                    told = json.loads(frames[start + HEADER.size : end])
                self._begin(told)
        self._segments[-1].data += frames[done:]

    def _begin(self, start: Mapping[str, Any]) -> None:
        number = 0
        if self._segments:
            last = self._segments[-1]
            number = last.number + 1
            self._size += len(last.data)
        self._segments.append(_Segment(number, self._epoch, self._step, self._clock(), start))

    def _end_all(self) -> None:
        """Mark the requests of a lost engine as ended."""
        number = self._segments[-1].number
        for announced in self._announced.values():
            if announced.ended is None:
                announced.ended = number

    def _forget(self) -> None:
        self._forget_announced()
        if self.num_bytes <= self._most:
            return
        last = self._segments[-1]
        if len(last.data) > self._most - self._announced_size:
            # without a keyframe for that long no reader could begin inside: the segment is dropped
            # with all before it. Live requests are announced to readers that begin at the next one
            self._segments.clear()
            self._size = 0
            self._segments.append(
                _Segment(
                    last.number + 1,
                    self._epoch,
                    self._step,
                    self._clock(),
                    last.start,
                    lost_from=last.step if last.lost_from is None else last.lost_from,
                )
            )
            self._forget_ended()
        # drops slightly more than necessary, so that announcements are not searched at each message
        while self.num_bytes > self._most and len(self._segments) > 1:
            while self.num_bytes > 0.95 * self._most and len(self._segments) > 1:
                self._size -= len(self._segments.popleft().data)
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget requests whose end has left the kept history."""
        oldest = self._segments[0].number
        for key in [
            key
            for key, told in self._announced.items()
            if told.ended is not None and told.ended < oldest
        ]:
            self._drop(key)

    def _forget_announced(self) -> None:
        """Drop announcements above half of the limit; frames may use the rest."""
        while self._announced_size > self._most // 2:
            self._drop(next(iter(self._announced)))

    def _drop(self, key: tuple[int, int]) -> None:
        self._announced_size -= len(self._announced.pop(key).frame) + _ENTRY

    # ------------------------------------------------------------------ to viewers

    def history(self, *, since: tuple[int, int] | None = None, seconds: float = 60.0) -> bytes:
        """Return frames from a keyframe on: the last one before step ``since`` = (engine, step), or
        the one ``seconds`` ago."""
        first = self._segments[0]
        begin, gap = first, b""
        if since is None:
            oldest = self._clock() - seconds
            for segment in self._segments:
                if segment.began <= oldest:
                    begin = segment
            if begin.lost_from is not None:
                told = {"from": begin.lost_from, "to": begin.step, "why": "history"}
                gap = _told(FrameType.GAP, **told)
        else:
            for segment in self._segments:
                if (segment.epoch, segment.step) <= since:
                    begin = segment
            if begin is first and (first.epoch, first.step) > since:
                told = {"from": since[1], "to": first.step, "why": "history"}
                gap = _told(FrameType.GAP, **told)
        return self._opening(begin, None if since is None else since[0], gap) + self._from(begin)

    def _opening(self, begin: _Segment, engine: int | None, gap: bytes = b"") -> bytes:
        """Return the frames before a segment: which engine it is, unless the reader knows or the
        segment begins with its START."""
        starts = begin.data.startswith(_START)
        tells = not starts and engine != begin.epoch
        # lanes are not in this copied START; they come with the next keyframe
        told = _told(FrameType.START, **{**begin.start, "goes_on": True}) if tells else b""
        return self._hello(begin.epoch - (starts or tells)) + told + gap

    def follow(
        self,
        *,
        since: tuple[int, int] | None,
        seconds: float,
        ends: Callable[[], bool],
        drains: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[bytes]:
        """Yield ``history``, then new frames until ``ends()``; gauges at least each second, and a
        notice once ``drains()``.

        Raises:
            TooManyViewersError: the maximum number of viewers is reached.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            raise TooManyViewersError(
                f"{MOST_VIEWERS} pages follow the timeline already; ask without follow=1 instead"
            )
        # registered now, before another request can take the slot
        viewer = _Viewer()
        self._viewers.add(viewer)
        return self._stream(viewer, since, seconds, ends, drains)

    async def _stream(
        self,
        viewer: _Viewer,
        since: tuple[int, int] | None,
        seconds: float,
        ends: Callable[[], bool],
        drains: Callable[[], bool],
    ) -> AsyncIterator[bytes]:
        try:
            # the history includes the queued frames
            viewer.take()
            viewer.behind = False
            frames = self.history(since=since, seconds=seconds)
            # the reader's position after the history, however long reading takes
            seen, told_of_end = (self._epoch, self._step), False
            yield frames
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
                    viewer.behind = False
                    last = self._segments[-1]
                    told = {"from": seen[1], "to": last.step, "why": "slow viewer"}
                    gap = _told(FrameType.GAP, **told)
                    frames = self._opening(last, seen[0], gap) + self._from(last)
                else:
                    frames = viewer.take()
                seen = (self._epoch, self._step)
                yield frames
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

    def _start(self) -> dict[str, Any]:
        """Return START of the engine that runs already; its own START was sent before."""
        info = self._client.info
        return {
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "policy": info.policy,
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "num_host_blocks": self._client.stats.scheduler.num_host_blocks,
        }

    def _hello(self, before: int) -> bytes:
        """Return HELLO; ``before`` is the engine of the frames up to the next START."""
        info, first = self._client.info, self._segments[0]
        return _told(
            FrameType.HELLO,
            **vocabulary(),
            server=self._server,
            engine=self._epoch,
            first=before,
            now=self._clock(),
            # added to a time of the engine's clock, it gives seconds since 1970
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
            blocked_by=scheduler.blocked_by,
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
