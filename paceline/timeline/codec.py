"""Encoding of frames as bytes, and decoding.

Little endian. A frame is a header of eight bytes, ``type u8, flags u8, 0 u16, length u32``, and
``length`` bytes after it. Strings are a length (u8) and UTF-8. The page reads the same format
(``timeline/decode.js``), and both are held to the vectors in ``tests/ui/vectors``.

No input breaks a reader: it skips types that it does not know, and frames whose content does not
match their type, and counts both.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from paceline.timeline.events import (
    Announce,
    Done,
    End,
    Event,
    Frame,
    FrameType,
    Keyframe,
    LaneState,
    Plan,
    Told,
)

__all__ = [
    "HEADER",
    "MAX_FRAME",
    "Decoder",
    "clipped",
    "encode",
    "encode_announce",
    "encode_done",
    "encode_end",
    "encode_plan",
    "headers",
]

HEADER: Final = struct.Struct("<BBHI")
# most bytes of a frame; a longer one is not ours, and no reader waits for its end
MAX_FRAME: Final = 16 * 2**20
# header and content in one call
_PLAN: Final = struct.Struct("<BBHI IdffIIIIHHHBBHH")
_DONE: Final = struct.Struct("<BBHI IHHdf")
_ANNOUNCE: Final = struct.Struct("<BBHI IIddIIiBBffff")
_END: Final = struct.Struct("<BBHI IdBBIIIIIIddf7f")
_KEYFRAME: Final = struct.Struct("<IIdBBH")
_LANE: Final = struct.Struct("<IHBBIIfd")
_EVENT: Final = struct.Struct("<HBBI")
_SIZE: Final = HEADER.size
# sizes of the content after the header, without events and texts
_PLAN_BODY: Final = _PLAN.size - _SIZE
_DONE_BODY: Final = _DONE.size - _SIZE
_ANNOUNCE_BODY: Final = _ANNOUNCE.size - _SIZE
_END_BODY: Final = _END.size - _SIZE
_EVENT_SIZE: Final = _EVENT.size
# plain numbers, which are packed faster
_OF_PLAN, _OF_DONE = int(FrameType.PLAN), int(FrameType.DONE)
_OF_ANNOUNCE, _OF_END = int(FrameType.ANNOUNCE), int(FrameType.END)
_MOST: Final = 0xFFFF
_MOST_U32: Final = 0xFFFFFFFF
_MOST_I32: Final = 2**31 - 1
# most bytes of a caller's string, and the encoded lengths
_CLIP: Final = 128
_LENGTHS: Final = tuple(bytes((length,)) for length in range(_CLIP + 1))
_THIN: Final = 1


def encode(frame: Frame) -> bytes:
    """Encode one frame. Numbers that are too large for their field become the largest that fits."""
    if isinstance(frame, Plan):
        return encode_plan(*frame[:-1], _numbers(frame.events))
    if isinstance(frame, Done):
        return encode_done(*frame[:-1], _numbers(frame.events))
    if isinstance(frame, Announce):
        return encode_announce(*frame)
    if isinstance(frame, End):
        return encode_end(*frame)
    if isinstance(frame, Keyframe):
        body = _KEYFRAME.pack(len(frame.lanes), frame.step, frame.now, frame.reset, 0, 0)
        body += b"".join(
            _LANE.pack(
                lane.number,
                lane.lane,
                lane.state,
                lane.demoted,
                lane.computed,
                lane.preemptions,
                lane.waited,
                lane.since,
            )
            for lane in frame.lanes
        )
        return HEADER.pack(FrameType.KEYFRAME, 0, 0, len(body)) + body
    body = json.dumps(frame.told, separators=(",", ":")).encode()
    return HEADER.pack(frame.type, 0, 0, len(body)) + body


def encode_done(step: int, done: float, backend: float, events: list[int]) -> bytes:
    """Encode a ``Done`` from its fields; events as ``encode_plan`` takes them."""
    count = min(len(events) // 4, _MOST)
    size = _DONE_BODY + _EVENT_SIZE * count
    head = _DONE.pack(_OF_DONE, 0, 0, size, step, count, 0, done, backend)
    return head + _events_of(events, count) if count else head


def encode_announce(
    number: int,
    parent: int,
    arrival: float,
    added: float,
    prompt_tokens: int,
    max_tokens: int,
    priority: int,
    best_effort: bool,
    resumed: bool,
    ttft: float,
    tpot: float,
    deadline: float,
    predicted_ttft: float,
    request_id: str,
    slo_class: str,
    tenant: str,
) -> bytes:
    """Encode an ``Announce`` from its fields."""
    texts = _text(request_id) + _name(slo_class) + _name(tenant)
    head = _ANNOUNCE.pack(
        _OF_ANNOUNCE,
        0,
        0,
        _ANNOUNCE_BODY + len(texts),
        number,
        parent,
        arrival,
        added,
        prompt_tokens if prompt_tokens < _MOST_U32 else _MOST_U32,
        max_tokens if max_tokens < _MOST_U32 else _MOST_U32,
        priority if -_MOST_I32 <= priority <= _MOST_I32 else _nearest_i32(priority),
        best_effort,
        resumed,
        ttft,
        tpot,
        deadline,
        predicted_ttft,
    )
    return head + texts


def encode_end(
    number: int,
    when: float,
    reason: int,
    demoted: bool,
    waits: Sequence[float],
    chunks: int,
    preemptions: int,
    recomputed: int,
    swapped: int,
    cached: int,
    output_tokens: int,
    first_scheduled: float,
    first_token: float,
    predicted_ttft: float,
) -> bytes:
    """Encode an ``End`` from its fields."""
    return _END.pack(
        _OF_END,
        0,
        0,
        _END_BODY,
        number,
        when,
        reason,
        demoted,
        chunks if chunks < _MOST_U32 else _MOST_U32,
        preemptions if preemptions < _MOST_U32 else _MOST_U32,
        recomputed if recomputed < _MOST_U32 else _MOST_U32,
        swapped if swapped < _MOST_U32 else _MOST_U32,
        cached,
        output_tokens,
        first_scheduled,
        first_token,
        predicted_ttft,
        *waits,
    )


def encode_plan(
    step: int,
    planned: float,
    predicted: float,
    limit: float,
    budget: int,
    tokens: int,
    free_blocks: int,
    waiting: int,
    merged: int,
    narrow: int,
    wide: int,
    blocked_by: int,
    pressure: int,
    thin: bool,
    events: list[int],
) -> bytes:
    """Encode a ``Plan`` from its fields; events as numbers, four for each (lane, kind, 0,
    value)."""
    count = min(len(events) // 4, _MOST)
    head = _PLAN.pack(
        _OF_PLAN,
        _THIN if thin else 0,
        0,
        _PLAN_BODY + _EVENT_SIZE * count,
        step,
        planned,
        predicted,
        limit,
        budget,
        tokens,
        free_blocks,
        waiting,
        merged if merged < _MOST else _MOST,
        narrow if narrow < _MOST else _MOST,
        wide if wide < _MOST else _MOST,
        blocked_by,
        pressure,
        count,
        0,
    )
    return head + _events_of(events, count) if count else head


def _events_of(events: list[int], count: int) -> bytes:
    if len(events) > 4 * count:
        events = events[: 4 * count]
    return struct.pack("<" + "HBBI" * count, *events)


def _numbers(events: Sequence[Event]) -> list[int]:
    return [number for lane, kind, value in events for number in (lane, kind, 0, value)]


def clipped(text: str) -> str:
    """Return a caller's string as frames carry it."""
    return _text(text)[1:].decode()


def headers(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (type, start, end) of every whole frame in ``data``, which begins with one."""
    at, size = 0, len(data)
    while at + _SIZE <= size:
        kind, _, _, length = HEADER.unpack_from(data, at)
        end = at + _SIZE + length
        if length > MAX_FRAME or end > size:
            return
        yield kind, at, end
        at = end


class Decoder:
    """Turns bytes, split anywhere, into frames. Never raises."""

    def __init__(self) -> None:
        self._rest = b""
        # frames of unknown types, and frames whose content did not match their type
        self.num_unknown = 0
        self.num_broken = 0
        # an impossible header came: nothing more can be read
        self.lost = False

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete by now."""
        if self.lost:
            return []
        data = self._rest + data
        frames: list[Frame] = []
        at = 0
        for kind, start, at in headers(data):
            frame = self._frame(kind, data, start, at)
            if frame is not None:
                frames.append(frame)
        self._rest = data[at:]
        if len(self._rest) >= _SIZE and HEADER.unpack_from(self._rest)[3] > MAX_FRAME:
            self.lost, self._rest = True, b""
        return frames

    def _frame(self, kind: int, data: bytes, start: int, end: int) -> Frame | None:
        reader = _READERS.get(kind)
        if reader is None:
            self.num_unknown += 1
            return None
        try:
            return reader(data[start:end])
        except (struct.error, ValueError, RecursionError):
            self.num_broken += 1
            return None


def _plan(data: bytes) -> Frame:
    told = _PLAN.unpack_from(data)
    return Plan._make((*told[4:-2], bool(told[1] & _THIN), _events(data, _PLAN.size, told[-2])))


def _done(data: bytes) -> Frame:
    _, _, _, _, step, count, _, done, backend = _DONE.unpack_from(data)
    return Done(step, done, backend, _events(data, _DONE.size, count))


def _events(data: bytes, at: int, count: int) -> tuple[Event, ...]:
    end = at + count * _EVENT.size
    if len(data) < end:
        raise ValueError("fewer events than were said")
    return tuple(
        Event(lane, kind, value) for lane, kind, _, value in _EVENT.iter_unpack(data[at:end])
    )


def _announce(data: bytes) -> Frame:
    told = _ANNOUNCE.unpack_from(data)
    at, texts = _ANNOUNCE.size, []
    for _ in range(3):
        if at >= len(data):
            raise ValueError("a string is missing")
        end = at + 1 + data[at]
        if end > len(data):
            raise ValueError("a string is cut")
        texts.append(data[at + 1 : end].decode("utf-8", "replace"))
        at = end
    return Announce._make((*told[4:11], bool(told[11]), bool(told[12]), *told[13:], *texts))


def _end(data: bytes) -> Frame:
    told = _END.unpack_from(data)
    number, when, reason, demoted = told[4:8]
    return End(number, when, reason, bool(demoted), told[17:], *told[8:17])


def _keyframe(data: bytes) -> Frame:
    count, step, now, reset, _, _ = _KEYFRAME.unpack_from(data, _SIZE)
    at = _SIZE + _KEYFRAME.size
    end = at + count * _LANE.size
    if len(data) < end:
        raise ValueError("fewer lanes than were said")
    lanes = [
        LaneState(number, lane, state, bool(demoted), *rest)
        for number, lane, state, demoted, *rest in _LANE.iter_unpack(data[at:end])
    ]
    return Keyframe(step, now, bool(reset), tuple(lanes))


def _told(data: bytes) -> Frame:
    told: Any = json.loads(data[_SIZE:])
    if not isinstance(told, dict):
        raise ValueError("an object was expected")
    return Told(FrameType(data[0]), told)


_READERS: Final[dict[int, Callable[[bytes], Frame]]] = {
    FrameType.PLAN: _plan,
    FrameType.DONE: _done,
    FrameType.ANNOUNCE: _announce,
    FrameType.END: _end,
    FrameType.KEYFRAME: _keyframe,
    **dict.fromkeys(
        (
            FrameType.HELLO,
            FrameType.START,
            FrameType.GAUGES,
            FrameType.GAP,
            FrameType.NOTICE,
            FrameType.DOOR,
        ),
        _told,
    ),
}


def _text(text: str) -> bytes:
    """Encode at most ``_CLIP`` bytes of a text, without half characters."""
    data = text.encode("utf-8", "replace")
    if len(data) > _CLIP:
        data = data[:_CLIP].decode("utf-8", "ignore").encode()
    return _LENGTHS[len(data)] + data


# cached, as classes and tenants are few and recur
_name: Final = lru_cache(maxsize=1024)(_text)


def _nearest_i32(number: int) -> int:
    return max(-_MOST_I32 - 1, min(_MOST_I32, number))
