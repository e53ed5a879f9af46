"""Gates between a request at the small model and its caller: one keeps the whole answer, one holds
the first tokens of a stream back until it is opened.

A gate takes the place of the caller's connection. What it has not let through, the caller never
sees.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.types import Message

from paceline.gateway.cascade.answer import Said, shown, tokens_of
from paceline.gateway.cascade.prompt import Prompt
from paceline.gateway.requests.body import Body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.streams.openai_stream import DONE
from paceline.http.body_writer import BodyWriter
from paceline.http.upstream import Headers
from paceline.routing.cascade import Answer, Token
from paceline.wire.sse import SseEvents, payload_of

__all__ = ["OpenGate", "PrefixGate", "WholeGate", "behind"]

_KEPT: Final = frozenset({b"content-type", b"cache-control", b"x-accel-buffering"})
# fields of a delta that hold output
_OUTPUT: Final = ("content", "tool_calls", "reasoning_content", "reasoning", "refusal")


def behind(incoming: IncomingRequest, gate: WholeGate) -> IncomingRequest:
    """Return the request with ``gate`` in place of its caller's connection."""
    return IncomingRequest(
        incoming.scope, incoming.path, incoming.headers, incoming.receive, gate.send,
        incoming.request_id, incoming.common, gate.writer, incoming.key, incoming.tenant,
        incoming.ticket,
    )  # fmt: skip


class _OpenWriter(BodyWriter):
    """Fast path of a caller's connection, for good answers alone."""

    __slots__ = ("_incoming",)

    def __init__(self, writer: BodyWriter, incoming: IncomingRequest) -> None:
        super().__init__(writer._cycle)
        self._incoming = incoming

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        self._incoming.started = super().start(status, headers, body)
        return self._incoming.started

    def whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        self._incoming.started = status == 200 and super().whole(status, headers, body)
        return self._incoming.started


class WholeGate:
    """Keeps an answer."""

    # this gate keeps the answer back, so no fast path leads past it to the caller
    writer: BodyWriter | None = None

    def __init__(self) -> None:
        # stays 0 until the answer has a status
        self.status = 0
        self.headers: Headers = []
        self.body = bytearray()

    @property
    def kept(self) -> Headers:
        """The headers that are the answer's; the caller's connection has the others itself."""
        return [
            header
            for header in self.headers
            if header[0] in _KEPT or header[0].startswith(b"x-paceline-")
        ]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        else:
            self.body += message.get("body", b"")


class OpenGate(WholeGate):
    """Lets a good answer through at once, and keeps a refusal."""

    def __init__(self, incoming: IncomingRequest) -> None:
        super().__init__()
        self._incoming = incoming
        if incoming.writer is not None:
            self.writer = _OpenWriter(incoming.writer, incoming)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            self.status = 200
            # the request behind this gate has added the headers that every answer has
            self._incoming.started = True
        if self._incoming.started:
            await self._incoming.send_on(message)
        else:
            await super().send(message)

    async def pass_on(self) -> None:
        """Send the refusal that was kept."""
        start = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        self._incoming.started = True
        await self._incoming.send_on(start)
        body = {"type": "http.response.body", "body": bytes(self.body), "more_body": False}
        await self._incoming.send_on(body)


class _HeldWriter(BodyWriter):
    """Fast path of a caller's connection behind a ``PrefixGate``, which takes each part when it
    comes."""

    __slots__ = ("_gate",)

    def __init__(self, writer: BodyWriter, gate: PrefixGate) -> None:
        super().__init__(writer._cycle)
        self._gate = gate

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        if status != 200 or not self._gate.is_taking:
            return False
        self._gate.status, self._gate.headers = status, list(headers)
        return self.offer(body)

    def offer(self, body: bytes) -> bool:
        gate = self._gate
        if not gate.is_taking or (gate.is_open and not self.is_ready):
            return False
        gate.take(body)
        # a chunk of nothing would end the answer
        if gate.is_open and (out := gate.let_out()):
            self.write(out)
        return True

    def whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        return False

    def finish(self, body: bytes) -> bool:
        # an end is decided about, or follows an open gate, on the slow path
        return False


class PrefixGate(WholeGate):
    """Holds the first ``first`` tokens of a stream back, and reads them. What its caller will see
    is written while it is held, so that nothing but the decision is left to do once they are there.

    Args:
        body: the request as it came.
    """

    def __init__(self, incoming: IncomingRequest, body: Body, first: int) -> None:
        super().__init__()
        self._incoming, self._body, self._first = incoming, body, first
        if incoming.writer is not None:
            self.writer = _HeldWriter(incoming.writer, self)
        self._events = SseEvents()
        # events for the caller; last chunks, which say what was decided, are not written yet
        self._held: list[dict[str, Any] | bytes] = []
        self._tokens: list[Token] = []
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._finish = ""
        # the engine failed behind its first token, and no other one could go on
        self._has_failed = False
        # parts with output, for streams without log-probabilities
        self.num_parts = 0
        # done once the first tokens are there, or the answer is over
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opened = asyncio.Event()
        self._note: Mapping[str, Any] = {}

    @property
    def is_whole(self) -> bool:
        """Whether the answer has ended."""
        return bool(self._finish)

    @property
    def is_answer(self) -> bool:
        """Whether there is anything to judge: a stream with output that has not failed."""
        return self.num_tokens > 0 and not self._has_failed

    @property
    def num_tokens(self) -> int:
        return max(len(self._tokens), self.num_parts)

    def said(self, prompt: Prompt) -> Said:
        """Return what was said so far."""
        answer = Answer(
            text="".join(self._text),
            finish_reason=self._finish or "stop",
            refusal="".join(self._refusal),
            calls=[(name, arguments) for name, arguments in self._calls.values()],
            tools=prompt.tools,
            wants_call=prompt.wants_call,
            wants_json=prompt.wants_json,
            schema=prompt.schema,
        )
        return Said(answer, self._tokens)

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @property
    def is_taking(self) -> bool:
        """Whether a part that comes now need not wait: the gate has room, or is open."""
        return self.is_open or not self.ready.done()

    async def open(self, note: Mapping[str, Any], told: Headers) -> None:
        """Let everything through from now on; ``note``: for the last chunk, ``told``: for the
        head."""
        self._note = note
        start = {"type": "http.response.start", "status": 200, "headers": [*self.kept, *told]}
        await self._incoming.send(start)
        # parts that come meanwhile wait, so they stay in order
        await self._send_out(self.let_out(), more=True)
        self._opened.set()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await super().send(message)
            return
        data, more = message.get("body", b""), message.get("more_body", False)
        if self.status != 200:
            self.body += data
            return
        self.take(data)
        if not more:
            self._set_ready()
        if not self.is_taking or not more:
            await self._opened.wait()
        if self.is_open:
            await self._send_out(self.let_out() + (b"" if more else DONE), more=more)

    def take(self, data: bytes) -> None:
        """Read a part of the stream."""
        for event in self._events.feed(data):
            self._read(event)
        if self._finish or self.num_tokens >= self._first:
            self._set_ready()

    def _set_ready(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def let_out(self) -> bytes:
        """Return what is held, for the caller of an open gate."""
        held, self._held = self._held, []
        return b"".join(
            each if isinstance(each, bytes) else self._shown(each, self._note) for each in held
        )

    def _shown(self, chunk: dict[str, Any], note: Mapping[str, Any] | None) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode(shown(chunk, self._body, note))

    async def _send_out(self, data: bytes, *, more: bool) -> None:
        if data:
            await self._incoming.send(
                {"type": "http.response.body", "body": data, "more_body": more}
            )

    def _read(self, event: bytes) -> None:
        payload = payload_of(event)
        if event.startswith(b":"):
            self._held.append(event + b"\n\n")
        if not payload or payload == b"[DONE]":
            return
        try:
            chunk = msgspec.json.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if not isinstance(chunk, dict):
            return
        choices = chunk.get("choices") or ()
        if not self.is_open:
            self._has_failed = self._has_failed or bool(chunk.get("error"))
            for choice in choices:
                self._read_choice(choice)
        ends = any(choice.get("finish_reason") for choice in choices)
        self._held.append(chunk if ends else self._shown(chunk, None))

    def _read_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        # log-probabilities in another form than the API's are left out
        with contextlib.suppress(msgspec.ValidationError):
            self._tokens += tokens_of(choice.get("logprobs"))
        text = delta.get("content")
        if isinstance(text, str) and text:
            self._text.append(text)
        refusal = delta.get("refusal")
        if isinstance(refusal, str):
            self._refusal.append(refusal)
        for call in delta.get("tool_calls") or ():
            told = call.get("function") or {}
            kept = self._calls.setdefault(call.get("index", 0), ["", ""])
            kept[0] += told.get("name") or ""
            kept[1] += told.get("arguments") or ""
        # a model that thinks aloud makes tokens, too
        self.num_parts += any(map(delta.get, _OUTPUT))
        self._finish = self._finish or choice.get("finish_reason") or ""
