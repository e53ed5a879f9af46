"""The timeline's recent past, in memory, and those who follow it.

::

    engine ==frames==> Feed.take --> segments of two seconds, the oldest of which go
                                 \\-> a bounded queue for each viewer --> its stream

Frames are kept as the bytes that they came as; only their headers are looked at. A segment begins
with a keyframe, so a viewer can begin at any: it is first told which engine it is (START) and sent
the announcements of the requests that lived then. A viewer that does not keep up loses what waits
for it, is told so (GAP), and goes on at the newest keyframe; it costs the engine nothing and this
process a bounded queue.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakSet

from paceline.core.errors import PacelineError
from paceline.engine.protocol import EngineClient
from paceline.engine.timeline.codec import HEADER, encode, headers
from paceline.engine.timeline.events import FrameType, Told, vocabulary

__all__ = ["MOST_VIEWERS", "Feed", "TooManyViewersError"]

MOST_VIEWERS: Final = 8
# messages that may wait for a viewer, some three seconds of a busy engine, and bytes of them beside
# the newest
_MOST_WAITING: Final = 64
_MOST_WAITING_BYTES: Final = 256 * 1024
# bytes that an announcement takes beside its frame
_ENTRY: Final = 256
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
    # what the START of its engine said
    start: Mapping[str, Any]
    data: bytearray = field(default_factory=bytearray)
    # requests that it tells of from beginning to end
    num_whole: int = 0
    # what was before it was forgotten from this step on, in the middle of what a keyframe began:
    # it has none of its own at its beginning
    lost_from: int | None = None


@dataclass(slots=True)
class _Announced:
    frame: bytes
    epoch: int
    # numbers of the segments in which it was told, and in which it ended
    segment: int
    ended: int | None = None


@dataclass(eq=False)
class _Viewer:
    """Has a place from the moment it asks until its stream ends, or is forgotten unread."""

    waiting: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    # what waited was dropped
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
    """Made once for an app, on the event loop that ``client`` speaks on.

    Args:
        most_bytes: of frames that are kept, announcements that viewers are sent again included.
            Half of it at most is theirs: beyond that the oldest are forgotten, and a page opened
            then knows those requests by number alone.
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
        # tells a server from the one before it at the same address, which counted engines too
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
        # what was before is not known, and there was nothing
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
        """Of frames and announcements that are kept."""
        return self._size + len(self._segments[-1].data) + self._announced_size

    @property
    def num_requests(self) -> int:
        """Of those that the frames that are kept tell of."""
        return len(self._announced) + sum(segment.num_whole for segment in self._segments)

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
            viewer.tell(frames)

    def _keep(self, frames: bytes) -> None:
        done = 0
        for kind, start, end in headers(frames):
            at = start + HEADER.size
            if kind == FrameType.PLAN:
                self._step = _FIRST_U32.unpack_from(frames, at)[0]
            elif kind == FrameType.ANNOUNCE:
                number = _FIRST_U32.unpack_from(frames, at)[0]
                if (self._epoch, number) in self._announced:
                    self._drop((self._epoch, number))
                self._announced[self._epoch, number] = _Announced(
                    frames[start:end], self._epoch, self._segments[-1].number
                )
                self._announced_size += end - start + _ENTRY
            elif kind == FrameType.END:
                number = _FIRST_U32.unpack_from(frames, at)[0]
                announced = self._announced.get((self._epoch, number))
                if announced is not None:
                    announced.ended = self._segments[-1].number
                    if announced.segment == announced.ended:
                        # whoever reads of its end has read of its beginning
                        self._drop((self._epoch, number))
                        self._segments[-1].num_whole += 1
            elif kind in (FrameType.KEYFRAME, FrameType.START):
                self._segments[-1].data += frames[done:start]
                done = start
                told = self._segments[-1].start
                if kind == FrameType.START:
                    self._end_all()
                    self._epoch, self._step = self._epoch + 1, 0
                    told = json.loads(frames[at:end])
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
        """The requests of an engine that is gone are over."""
        number = self._segments[-1].number
        for announced in self._announced.values():
            if announced.ended is None:
                announced.ended = number

    def _forget(self) -> None:
        if self.num_bytes <= self._most:
            return
        self._forget_announced()
        last = self._segments[-1]
        if len(last.data) > self._most - self._announced_size:
            # without a keyframe for so long, nothing could begin within it: so it goes, with what
            # was before it. Requests that live are announced to whoever begins at the next one
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
        # a little more than it must, so that announcements are not gone through with each message
        while self.num_bytes > self._most and len(self._segments) > 1:
            while self.num_bytes > 0.95 * self._most and len(self._segments) > 1:
                self._size -= len(self._segments.popleft().data)
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Of requests whose end is told no more, nothing is."""
        oldest = self._segments[0].number
        for key in [
            key
            for key, told in self._announced.items()
            if told.ended is not None and told.ended < oldest
        ]:
            self._drop(key)

    def _forget_announced(self) -> None:
        """Leave the frames their half, and as much more as announcements leave free."""
        while self._announced_size > self._most // 2:
            self._drop(next(iter(self._announced)))

    def _drop(self, key: tuple[int, int]) -> None:
        self._announced_size -= len(self._announced.pop(key).frame) + _ENTRY

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
        """What goes before a segment: which engine it is, unless the reader knows that one or the
        segment itself says so."""
        starts = begin.data.startswith(_START)
        tells = not starts and engine != begin.epoch
        # of a START that is not the engine's own, lanes come with the keyframe that follows
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
        """The same, and then what comes, until ``ends()``; gauges each second at least, and once
        that ``drains()``.

        Raises:
            TooManyViewersError: all places are taken.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            raise TooManyViewersError(
                f"{MOST_VIEWERS} pages follow the timeline already; ask without follow=1 instead"
            )
        # its place is taken before anybody else can ask
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
            # the history has what waits
            viewer.take()
            viewer.behind = False
            frames = self.history(since=since, seconds=seconds)
            # what the reader knows when it has read this, however long that takes it
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
        """Of the engine that runs when this is made, whose own START came before."""
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
        """``before``: the engine of what follows, until a START says that the next one begins."""
        info, first = self._client.info, self._segments[0]
        return _told(
            FrameType.HELLO,
            **vocabulary(),
            server=self._server,
            engine=self._epoch,
            first=before,
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
