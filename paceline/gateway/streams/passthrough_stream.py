"""Relay of streams that are passed on unchanged, watched for their beginning, end and usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from paceline.gateway.streams.chunks import says_error
from paceline.gateway.streams.openai_stream import StreamRelay
from paceline.gateway.streams.pauses import BEGINNINGS, is_between_parts
from paceline.gateway.streams.usage import Usage
from paceline.wire.sse import (
    MAX_EVENT_BYTES,
    PINGS,
    name_of,
    names_error,
    payload_of,
)

__all__ = ["PASSTHROUGH", "PassthroughRelay"]


class _Told(msgspec.Struct):
    """Usage in events of Anthropic's messages and OpenAI's responses."""

    usage: Usage | None = None
    message: _Told | None = None
    response: _Told | None = None


class _Typed(msgspec.Struct):
    type: str = ""


class _Begun(msgspec.Struct):
    """Event that begins a block or an item."""

    content_block: _Typed | None = None
    item: _Typed | None = None


class _Stopped(msgspec.Struct):
    stop_reason: str | None = None


class _Odd(msgspec.Struct):
    """Event that may tell how an answer ends."""

    type: str = ""
    error: msgspec.Raw = msgspec.Raw(b"")
    delta: _Stopped | None = None


def _kind_of(event: bytes, payload: bytes) -> bytes:
    """Return an event's name, or without a name the type in its data; text in the data never
    counts."""
    if name := name_of(event):
        return name
    try:
        return msgspec.json.decode(payload, type=_Typed).type.encode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b""


def _read_odd(payload: bytes) -> _Odd:
    try:
        return msgspec.json.decode(payload, type=_Odd)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Odd()


def _what_begins(name: bytes, payload: bytes) -> str:
    """Return the type of the part that an event begins; empty: none begins, or it is not given."""
    if name not in BEGINNINGS:
        return ""
    try:
        begun = msgspec.json.decode(payload, type=_Begun)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    what = begun.content_block or begun.item
    return "" if what is None else what.type


@dataclass(slots=True, eq=False, kw_only=True)
class PassthroughRelay(StreamRelay):
    """Relay of unchanged streams: Anthropic's messages and OpenAI's responses. These are not
    resumed and have no template, as their events have names. A cascade's note goes into the last
    event; other notes are in the headers alone.

    Events are held back until the first one with output: an engine that fails earlier leaves no
    trace, and the request can start over on another one.

    Args:
        path: of the request.
        says: suffixes of the names of events that carry a part of the answer.
        ends: names of the last event, one for each way to end.
        fails: names of events that report an error.
        stops: name of the event that tells why the answer ended, and the last event to write after
            it; None: only the last event shows that the answer is complete.
    """

    path: str
    says: tuple[bytes, ...]
    ends: tuple[bytes, ...]
    fails: tuple[bytes, ...]
    stops: tuple[bytes, bytes] | None = None
    between_parts: bool = True
    _num_deltas: int = 0
    _counted: int | None = None
    _held: bytes = b""
    # for the last event
    _note: Mapping[str, Any] = field(default_factory=dict)
    # the reason of the end is known: later errors do not matter
    _is_said: bool = False

    @property
    def num_output_tokens(self) -> int:
        return self._num_deltas if self._counted is None else self._counted

    def annotate(self, note: Mapping[str, Any]) -> None:
        if "cascade" in note:
            self._note = note

    def begin_attempt(self, *, by_text: bool = False) -> None:
        assert not by_text, "these streams are not resumed"
        StreamRelay.begin_attempt(self)
        self._held, self._is_said = b"", False
        self.between_parts = True

    def feed(self, data: bytes) -> bytes:
        out = b""
        for event in self._events.feed(data):
            if self.failed is not None or self.done:
                break
            out += self._event(event)
        too_long = self._events.too_long or len(self._held) > MAX_EVENT_BYTES
        if too_long and not self.done and self.failed is None:
            self.failed = f"an event of more than {MAX_EVENT_BYTES} bytes"
        return out

    def end_attempt(self) -> bytes:
        if self._is_said and not self.done:
            assert self.stops is not None, "an event said why it ended"
            self.done, self.failed = True, None
            last = self.stops[1].removesuffix(b"\n\n")
            return self._all_held() + self._noted(last, payload_of(last) or b"")
        if not self.done and self.failed is None:
            self.failed = "the stream ended in the middle of the answer"
        return b""

    def _event(self, event: bytes) -> bytes:
        whole = event + b"\n\n"
        payload = payload_of(event) or b""
        name = _kind_of(event, payload)
        if self._reports_error(name, payload):
            if not self._is_said:
                self.failed = "the engine reported an error"
                # clients of this API could not read it in another shape, or without a name
                self.failure_event = whole if payload and name in self.fails else b""
            return b""
        if not payload:
            # comments pass; a name without data is not an event
            return event.partition(b"\n")[0] + b"\n\n" if event.startswith(b":") else b""
        if name not in PINGS:
            self.num_events += 1
            self.between_parts = is_between_parts(name, _what_begins(name, payload))
        if b'"usage"' in event:
            self._count(payload)
        if self.stops is not None and name == self.stops[0]:
            delta = _read_odd(payload).delta
            self._is_said = self._is_said or (delta is not None and bool(delta.stop_reason))
        if name in self.ends:
            self.done = True
            whole = self._noted(event, payload)
        elif name.endswith(self.says):
            self._num_deltas += 1
        elif not self.emitted:
            self._held += whole
            return b""
        return self._all_held() + whole

    def _all_held(self) -> bytes:
        self.emitted = True
        held, self._held = self._held, b""
        return held

    def _noted(self, event: bytes, payload: bytes) -> bytes:
        """Return the last event with the note in its data, an object."""
        if not self._note or not payload.endswith(b"}"):
            return event + b"\n\n"
        head = [line for line in event.splitlines() if not line.startswith(b"data")]
        fields = payload[:-1].rstrip()
        comma = b"" if fields.endswith(b"{") else b","
        told = fields + comma + b'"paceline":' + msgspec.json.encode(self._note) + b"}"
        return b"\n".join([*head, *(b"data: " + line for line in told.split(b"\n"))]) + b"\n\n"

    def _reports_error(self, name: bytes, payload: bytes) -> bool:
        """Whether name, type or an ``error`` field (not in these APIs) reports an error."""
        if name in self.fails or names_error(name):
            return True
        # inside a string every quote is escaped, so this never matches text
        if b'"error"' not in payload:
            return False
        odd = _read_odd(payload)
        return odd.type == "error" or says_error(bytes(odd.error))

    def _count(self, payload: bytes) -> None:
        """Read usage, which takes precedence over the number of deltas; before the first delta it
        only counts the prompt."""
        try:
            told = msgspec.json.decode(payload, type=_Told)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        usage = told.usage or (told.message or told.response or told).usage
        if usage is None:
            return
        used = usage.used(self.path)
        self.prompt_tokens = used.prompt or self.prompt_tokens
        self.cached_tokens = used.cached or self.cached_tokens
        if self.emitted:
            self._counted = used.output


# makes the relay of a path whose streams are passed on unchanged
PASSTHROUGH: Final[Mapping[str, Callable[[], PassthroughRelay]]] = {
    "/v1/messages": partial(
        PassthroughRelay,
        path="/v1/messages",
        says=(b"content_block_delta",),
        ends=(b"message_stop",),
        fails=(b"error",),
        stops=(b"message_delta", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ),
    "/v1/responses": partial(
        PassthroughRelay,
        path="/v1/responses",
        says=(b".delta",),
        ends=(b"response.completed", b"response.incomplete"),
        fails=(b"response.failed", b"error"),
    ),
}
