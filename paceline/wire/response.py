"""Reading of HTTP/1.1 answers: bytes of one connection in, heads, bodies and ends out.

The one reader of the gateway, the client and ``paceline bench``. An answer is complete when its
length, its last chunk or, without either, the connection's end says so. Heads of status 1xx are
skipped, and trailers belong to no head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import httptools
import msgspec

from paceline.wire import fast_paths

__all__ = ["End", "Fault", "Head", "ReadEvent", "ResponseReader"]

MAX_HEAD_BYTES: Final = 64 * 1024
# a head in the form that nearly all servers send; the parser reads the others
_HEAD: Final = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9])(?: [ -~]*)?\r\n((?:[a-z0-9-]+: [!-~](?:[ -~]*[!-~])?\r\n)+)\r\n"
).match
_HEADERS: Final = re.compile(rb"([a-z0-9-]+): ([^\r]+)\r\n").findall
# headers that change how an answer is read
_FRAMING: Final = frozenset(
    {b"transfer-encoding", b"connection", b"proxy-connection", b"upgrade", b"trailer"}
)
# largest size line of a chunk, line break included, that is read without the parser
_MOST_SIZE_BYTES: Final = 9


class Head(msgspec.Struct, frozen=True):
    """Head of an answer."""

    status: int
    # names in lower case
    headers: list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class End:
    """End of an answer that is complete."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The connection holds no complete answer; nothing more can be read from it."""

    why: str


# bytes: a part of the body, not empty
ReadEvent = Head | bytes | End | Fault

_END: Final = End()


class _Lower(dict[bytes, bytes]):
    """Names of headers in lower case."""

    def __missing__(self, name: bytes) -> bytes:
        lower = name.lower()
        # servers cannot fill the memory with names
        if len(self) < 256 and len(name) <= 64:
            self[name] = lower
        return lower


_LOWER: Final = _Lower()


class ResponseReader:
    """Reader of one connection, whose answers follow each other.

    Args:
        max_head_bytes: of one answer's head, interim ones included, and of its trailers or one
            chunk's size line.
    """

    def __init__(self, max_head_bytes: int = MAX_HEAD_BYTES) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._max_head_bytes = max_head_bytes
        self._events: list[ReadEvent] = []
        # body parts of the present read
        self._parts: list[bytes] = []
        self._headers: list[tuple[bytes, bytes]] = []
        # bytes of the reads since the last event
        self._waiting_bytes = 0
        # bytes of the present answer's header lines; 0: not counted, as the reads were short
        self._parsed_bytes = 0
        # the present read may hold too long a head
        self._is_long = False
        self._in_head = True
        # the answer has a length, or chunks
        self._framed = False
        self._interim = False
        # the answer lets its connection carry another one
        self.keeps_alive = False
        # the parser has seen the end of a chunk, and no new one since
        self._chunk_ended = False
        # the next byte is the first of a chunk, and ``read_chunk`` may read that
        self._between_chunks = False
        self._may_skip = fast_paths.are_on()
        # the parser has read complete answers only, and ``_whole`` may read the next one
        self._between_answers = self._may_skip
        # the answer is complete
        self.is_complete = False
        # bytes came after a complete answer, which no request had asked for
        self.is_unsolicited = False

    @property
    def ends_with_connection(self) -> bool:
        """Whether the connection's end is now the end of the body, which has neither length nor
        chunks."""
        return not self._in_head and not self._framed

    def expect(self) -> None:
        """Take note that another request was sent: the next bytes are its answer."""
        self.is_complete = False

    def read_chunk(self, data: bytes) -> bytes | None:
        """Fast path for a read, instead of ``feed``: return its part of the body if it is one chunk
        alone in the common form; None: call ``feed``. The parser, which is between two chunks, need
        not see it."""
        if not self._between_chunks:
            return None
        start = data.find(b"\r\n", 1, _MOST_SIZE_BYTES) + 2
        size = len(data) - start - 2
        if size > 0 and data[:start] == b"%x\r\n" % size and data[-2:] == b"\r\n":
            return data[start:-2]
        return None

    def feed(self, data: bytes) -> list[ReadEvent]:
        """Return what ``data`` holds, with the body in one piece. No error is raised; after a
        ``Fault`` there is nothing more to read."""
        if self._between_answers:
            whole = self._whole(data)
            if whole is not None:
                return whole
            self._between_answers = False
        events: list[ReadEvent] = []
        self._events = events
        self._waiting_bytes += len(data)
        self._is_long = self._waiting_bytes > self._max_head_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._parts.clear()
            events.append(Fault("the answer switches to another protocol"))
            return events
        except httptools.HttpParserError as error:
            # the valid part counts
            if self._parts:
                self._end_part()
            if self.is_complete:
                self.is_unsolicited = True
            else:
                events.append(
                    Fault(f"the answer is not HTTP: {str(error.__context__ or error)[:100]}")
                )
            return events
        if self._parts:
            self._end_part()
        if events:
            self._waiting_bytes = 0
            self._between_answers = self._may_skip and self.is_complete and self.keeps_alive
        elif self._is_long and not self.is_complete:
            what = "head" if self._in_head else "trailer or chunk extension"
            events.append(Fault(f"the answer's {what} has over {self._max_head_bytes} bytes"))
        self._between_chunks = self._may_skip and self._chunk_ended and data.endswith(b"\r\n")
        return events

    def _whole(self, data: bytes) -> list[ReadEvent] | None:
        """Fast path for a read: return its events if it is one whole answer in the common form;
        None: the parser must read it."""
        found = None if self.is_complete else _HEAD(data)
        if found is None:
            return None
        headers, status, body = _HEADERS(found[2]), int(found[1]), data[found.end() :]
        named = dict(headers)
        length = named.get(b"content-length", b"")
        if (
            # neither empty nor of a status without a body, and the parser counts longer numbers
            not body
            or status in (204, 304)
            or length != b"%d" % len(body)
            or len(named) < len(headers)
            or not _FRAMING.isdisjoint(named)
            or found.end() > self._max_head_bytes
        ):
            return None
        self.is_complete = self.keeps_alive = True
        return [Head(status, headers), body, _END]

    def _end_part(self) -> None:
        parts, self._parts = self._parts, []
        self._events.append(parts[0] if len(parts) == 1 else b"".join(parts))

    # ---------------------------------------------------------------- of the parser

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.is_unsolicited = True
            return
        self._headers, self._in_head, self._framed = [], True, False
        self._chunk_ended = self._between_chunks = False
        if not self._interim:
            self._parsed_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_unsolicited:
            return
        if self._is_long or not self._in_head:
            self._count(name, value)
            if not self._in_head:
                # a trailer does not belong to the head
                return
        name = _LOWER[name]
        if name in (b"content-length", b"transfer-encoding"):
            if name == b"transfer-encoding" and (
                self._framed or value.strip().lower() != b"chunked"
            ):
                raise ValueError("its transfer-encoding is not chunked alone")
            self._framed = True
        self._headers.append((name, value))

    def _count(self, name: bytes, value: bytes) -> None:
        """Count a header line. Raises ValueError, which stops the parser, for too many bytes."""
        if not self._parsed_bytes:
            self._parsed_bytes = sum(len(name) + len(value) for name, value in self._headers)
        self._parsed_bytes += len(name) + len(value)
        if self._parsed_bytes > self._max_head_bytes:
            raise ValueError("too long a head")

    def on_headers_complete(self) -> None:
        if self.is_unsolicited:
            return
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._interim:
            return
        self._in_head = False
        self.keeps_alive = self._framed and self._parser.should_keep_alive()
        if status in (204, 304):
            self._framed = True
        self._events.append(Head(status, self._headers))

    def on_body(self, data: bytes) -> None:
        if not self.is_unsolicited:
            self._parts.append(data)

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        if self._interim or self.is_unsolicited:
            return
        self.is_complete = True
        self._chunk_ended = False
        if self._parts:
            self._end_part()
        self._in_head = True
        self._events.append(_END)
