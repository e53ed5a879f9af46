"""Parsing of one answer, from the bytes of its connection and their times.

The driver feeds what it reads and asks for an :class:`Outcome`. No input from a server raises an
error here: an answer that is not HTTP, not a stream, not JSON or cut off is an outcome too.

Streams differ between servers; this module understands

* events as ``wire/sse.py`` reads them: any line end, comments, keep-alives of every kind;
* text in ``text``, ``delta.content``, ``delta.reasoning_content`` or ``delta.reasoning``, and tool
  calls; a first chunk with only a role is not a token;
* ``usage`` in any event; for a server without it, the chunks with text are counted;
* an end by ``[DONE]``, or only by a ``finish_reason``, after which nothing is a failure.

This module does not know clocks or sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from paceline.wire.response import Fault, Head, ResponseReader
from paceline.wire.sse import PINGS, SseEvents, name_of, names_error, payload_of

__all__ = ["REFUSALS", "Answer", "Outcome"]

# statuses of a server without room now; other errors are failures
REFUSALS: Final = frozenset({429, 503})
# most bytes of an event of a stream, and of a body that is no stream
_MOST_BYTES: Final = 4 << 20
_DETAIL_CHARS: Final = 200
# data without content
_NOTHING: Final = (b"", b"{}", b"null")
_TEXTS: Final = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one request. Seconds of the driver's clock, from the start of the run."""

    # index in the plan
    number: int
    # planned time to send it; None: as soon as another had ended
    due: float | None
    sent: float
    ended: float
    # as requested; None for a prompt from a file
    asked_prompt_tokens: int | None
    asked_output_tokens: int
    # 0 without an answer
    status: int = 0
    # "" for success, else a few words that group failures: "429", "cut off", "timeout"
    failure: str = ""
    # the server's or system's own message
    detail: str = ""
    # arrival of each chunk with text; one may hold several tokens
    chunks: tuple[float, ...] = ()
    # as the server counted them; None: it did not
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    # seconds to the first token, per token after it, and to the last; None: no such target
    slo: tuple[float | None, float | None, float | None] = (None, None, None)
    slo_class: str = "standard"
    tenant: str = ""

    @property
    def refused(self) -> bool:
        return bool(self.failure) and self.status in REFUSALS

    @property
    def tokens(self) -> int:
        """Output tokens by the server's count, or the number of chunks."""
        return self.output_tokens or len(self.chunks)


class Answer:
    """Parses one answer."""

    def __init__(self) -> None:
        self._reader = ResponseReader()
        self._now = 0.0
        self._status = 0
        self._stream = False
        self._events = SseEvents(_MOST_BYTES)
        # body so far, of an answer that is no stream
        self._rest = b""
        self._usage: Mapping[str, Any] = {}
        self._finish_reason: str | None = None
        self._finished_at = 0.0
        self._ends = False
        self._chunks: list[float] = []
        self._failure = ""
        self._detail = ""
        # body of an answer that is no stream
        self.body = b""
        # whether any byte came
        self.begun = False
        # whether all of the body came
        self.complete = False

    @property
    def status(self) -> int:
        """The HTTP status, 0 until it is known."""
        return self._status

    @property
    def done(self) -> bool:
        """Whether more bytes would change nothing."""
        return self.complete or bool(self._failure)

    def feed(self, now: float, data: bytes) -> None:
        """Process bytes that came at ``now``; no bytes are the connection's end."""
        self._now = now
        if not data:
            if self._reader.ends_with_connection and not self.complete:
                self._end()
            elif not self.complete:
                self.fail("cut off" if self.begun else "no answer", "the connection was closed")
            return
        self.begun = True
        for event in self._reader.feed(data):
            if isinstance(event, bytes):
                self._body(event)
            elif isinstance(event, Head):
                self._head(event)
            elif isinstance(event, Fault):
                self.fail("not HTTP", event.why)
            else:
                self._end()

    @property
    def reusable(self) -> bool:
        """Whether the connection may be used again."""
        reader = self._reader
        return reader.is_complete and reader.keeps_alive and not reader.is_unsolicited

    def fail(self, failure: str, detail: str) -> None:
        """End the answer. Of several failures the first counts, and none after a finish reason, as
        the answer was complete then."""
        if self._finish_reason is None:
            self._fail(failure, detail)
        elif not self.complete:
            self.complete = True
            self._close_stream()

    def _fail(self, failure: str, detail: str) -> None:
        if not self._failure:
            self._failure, self._detail = failure, " ".join(detail.split())[:_DETAIL_CHARS]

    def _head(self, head: Head) -> None:
        self._status = head.status
        kind = dict(head.headers).get(b"content-type", b"")
        self._stream = head.status == 200 and kind.lower().startswith(b"text/event-stream")

    def _body(self, data: bytes) -> None:
        if self._stream:
            for event in self._events.feed(data):
                self._event(event)
        else:
            self._rest += data
        if self._events.too_long or len(self._rest) > _MOST_BYTES:
            self.fail("too long", f"more than {_MOST_BYTES} bytes without an end")

    def _end(self) -> None:
        self.complete = True
        self.body = b"" if self._stream else self._rest
        if self._stream:
            self._close_stream()
        elif self._status != 200:
            self.fail(str(self._status), _message(self._rest))
        else:
            self.fail("no stream", f"the answer is not text/event-stream: {_message(self._rest)}")
        self._rest = b""

    # ---------------------------------------------------------------- the stream's

    def _event(self, event: bytes) -> None:
        data, name = payload_of(event) or b"", name_of(event)
        if names_error(name):
            self._odd("error in the stream", _message(data))
        elif data == b"[DONE]":
            self._ends = True
        elif data not in _NOTHING and name not in PINGS:
            self._chunk(data, name)

    def _chunk(self, data: bytes, name: bytes) -> None:
        try:
            event = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = None
        if not isinstance(event, dict):
            # readers of chunks ignore events of other names
            if name in (b"", b"message"):
                self._odd("not JSON", data[:_DETAIL_CHARS].decode(errors="replace"))
            return
        named = "error" in (event.get("object"), event.get("type")) and not event.get("choices")
        if event.get("error") or named:
            self._odd("error in the stream", _message(data))
            return
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0])

    def _odd(self, failure: str, detail: str) -> None:
        """End the answer by an event, unless it was complete before."""
        if self._finish_reason is None:
            self._fail(failure, detail)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta")
        if choice.get("text") or (
            isinstance(delta, dict) and any(delta.get(name) for name in _TEXTS)
        ):
            self._chunks.append(self._now)
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self._finish_reason, self._finished_at = reason, self._now

    def _close_stream(self) -> None:
        if not self._ends and self._finish_reason is None:
            self._fail("cut off", "the stream ended without [DONE] or a finish_reason")
        elif not self._chunks and _count(self._usage, "completion_tokens"):
            # tokens without text, such as only an end of sequence
            self._chunks.append(self._finished_at or self._now)
        elif not self._chunks:
            self._fail("no token", "the stream has neither text nor counted tokens")

    def results(self) -> dict[str, Any]:
        """Return the fields of an Outcome that the answer determines."""
        details = self._usage.get("prompt_tokens_details")
        return {
            "status": self._status,
            "failure": self._failure,
            "detail": self._detail,
            "chunks": tuple(self._chunks),
            "prompt_tokens": _count(self._usage, "prompt_tokens"),
            "output_tokens": _count(self._usage, "completion_tokens"),
            "cached_tokens": _count(details, "cached_tokens"),
            "finish_reason": self._finish_reason,
        }


def _count(values: Any, name: str) -> int | None:
    """Return a count that a server gave, or None: true, -1 and "many" are not counts."""
    value = values.get(name) if isinstance(values, dict) else None
    return value if type(value) is int and value >= 0 else None


def _message(body: bytes) -> str:
    """Return the message of an error in JSON of any form; else the beginning of the body."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:_DETAIL_CHARS].decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return value if isinstance(value, str) else str(value)
