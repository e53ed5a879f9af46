"""Encoding of frames as bytes, and decoding.

A frame is a header of eight bytes, little endian, ``type u8, 0 u8, 0 u16, length u32``, and
``length`` bytes after it: the fields of its class in ``events`` as a MessagePack array, or the JSON
of a ``Told``. The page reads the same format (``timeline/decode.js``), and both are held to the
vectors in ``tests/ui/vectors``.

No input breaks a reader: it skips types that it does not know, and frames whose content does not
match their type, and counts both. It passes over fields at the end that it does not know.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from paceline.timeline.events import Announce, Done, End, Frame, FrameType, Keyframe, Plan, Told

__all__ = ["HEADER", "MAX_FRAME", "Decoder", "clipped", "encode", "headers", "number_in"]

HEADER: Final = struct.Struct("<BBHI")
# most bytes of a frame; a longer one is not ours, and no reader waits for its end
MAX_FRAME: Final = 16 * 2**20
_SIZE: Final = HEADER.size
# plain numbers, which are packed faster than members of an enum
_TYPES: Final[dict[type, int]] = {
    Plan: int(FrameType.PLAN),
    Done: int(FrameType.DONE),
    Announce: int(FrameType.ANNOUNCE),
    End: int(FrameType.END),
    Keyframe: int(FrameType.KEYFRAME),
}
_READERS: Final[dict[int, Callable[[bytes], Frame]]] = {
    number: msgspec.msgpack.Decoder(kind).decode for kind, number in _TYPES.items()
}
_TOLD: Final = frozenset(FrameType) - _READERS.keys()
_pack: Final = msgspec.msgpack.Encoder().encode
# most bytes of a caller's string
_CLIP: Final = 128


class _First(msgspec.Struct, array_like=True):
    number: int


_first: Final = msgspec.msgpack.Decoder(_First).decode


def encode(frame: Frame) -> bytes:
    """Encode one frame."""
    if isinstance(frame, Told):
        body = json.dumps(frame.told, separators=(",", ":")).encode()
        return HEADER.pack(frame.type, 0, 0, len(body)) + body
    body = _pack(frame)
    return HEADER.pack(_TYPES[type(frame)], 0, 0, len(body)) + body


def clipped(text: str) -> str:
    """Return a caller's string as frames carry it: at most 128 bytes, without half characters."""
    return text.encode("utf-8", "replace")[:_CLIP].decode("utf-8", "ignore")


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


def number_in(frame: bytes) -> int:
    """Return the first field of a whole frame that is no ``Told``: its step or request."""
    return _first(frame[_SIZE:]).number


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
            frame = self._frame(kind, data[start + _SIZE : at])
            if frame is not None:
                frames.append(frame)
        self._rest = data[at:]
        if len(self._rest) >= _SIZE and HEADER.unpack_from(self._rest)[3] > MAX_FRAME:
            self.lost, self._rest = True, b""
        return frames

    def _frame(self, kind: int, body: bytes) -> Frame | None:
        try:
            if kind in _READERS:
                return _READERS[kind](body)
            if kind in _TOLD:
                told: Any = json.loads(body)
                if isinstance(told, dict):
                    return Told(FrameType(kind), told)
                self.num_broken += 1
            else:
                self.num_unknown += 1
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.num_broken += 1
        return None
