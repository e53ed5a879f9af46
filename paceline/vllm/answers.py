"""The way out of the middleware: refusals made 429, explanations in answers, lines in metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

import msgspec

from paceline.core.outputs import Timeline
from paceline.errors import InvalidRequestError, QueueFullError, RequestError
from paceline.http.errors import HttpError, error_body, reply_to
from paceline.http.fields import show
from paceline.server.protocol.responses import Explanation
from paceline.vllm.channel import ask
from paceline.vllm.metrics import metrics_lines

__all__ = [
    "Answer", "Message", "Receive", "Send", "WithMetrics", "refuse", "send_fate", "send_json",
]  # fmt: skip

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_HEADER: Final = b"x-paceline-request"
# how often, and after how many seconds, the engine is asked again for a fate that it does not know
# yet: a stop string is found in this process, and the engine hears of it later
_TRIES, _PAUSE = 5, 0.02
# events that come before the answer, also before an error: the Responses API tells of a request
# before the engine has seen it
_EARLY: Final = (
    b"event: response.created", b"event: response.in_progress", b"event: message_start",
)  # fmt: skip
# of a stream; vLLM 0.31 says no more than that of an error before the first token
_ENDS: Final = (b"data: [DONE]", b"event: message_stop")
# the part of a stream's last messages that has the usage of all of them
_USAGE: Final = re.compile(rb'"usage":\s*\{')


class Answer:
    """``send`` of one request: holds the head back until the first part of the answer."""

    def __init__(self, send: Send, tag: str, explains: bool) -> None:
        self._send, self._tag, self._explains = send, tag, explains
        self._head: Message | None = None
        # whether the head was sent
        self._begun = False
        # messages that were held back with the head
        self._early: list[Message] = []
        # the rest of an answer that was replaced by a refusal is dropped
        self._replaced = False

    async def __call__(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            self._head = message
            return
        if message["type"] == "http.response.body":
            message = dict(message)
            if self._head is not None and _is_early(message.get("body", b"")):
                self._early.append(message)
                return
            if self._head is not None and _is_error(self._head, message) and await self._refused():
                return
            if self._explains and _USAGE.search(message.get("body", b"")):
                body = await _explained(message["body"], self._tag)
                self._set_length(len(body) - len(message["body"]))
                message["body"] = body
            if self._head is not None:
                head, self._head, self._begun = self._head, None, True
                head["headers"] = [*head.get("headers", ()), (_HEADER, self._tag.encode())]
                await self._send(head)
                for early in self._early:
                    await self._send(early)
        await self._send(message)

    async def failed(self) -> bool:
        """Answer with a refusal if that is why the application raised an error. Returns whether it
        is."""
        return self._replaced or (not self._begun and await self._refused())

    async def _refused(self) -> bool:
        """Answer with a refusal if the engine refused the request. Returns whether it did."""
        for fate in await ask({"fate": self._tag}):
            refusal = fate["refusal"]
            if refusal is None:
                continue
            error: RequestError
            if refusal["status"] == 429:
                error = QueueFullError(
                    refusal["message"], refusal["retry_after"], refusal["reason"]
                )
            else:
                error = InvalidRequestError(refusal["message"], refusal["param"])
            self._replaced = True
            await refuse(error, self._send, self._tag)
            return True
        return False

    def _set_length(self, more: int) -> None:
        if self._head is None:
            return
        self._head["headers"] = [
            (name, str(int(value) + more).encode() if name.lower() == b"content-length" else value)
            for name, value in self._head.get("headers", ())
        ]


def _is_error(head: Message, message: Message) -> bool:
    """Whether an answer's first part may tell of the engine's refusal."""
    status, body = head["status"], message.get("body", b"")
    failed = b'"error"' in body[:1024] or body.startswith(_ENDS)
    return status >= 500 or (status == 200 and failed)


def _is_early(body: bytes) -> bool:
    """Whether a stream's message has no part of the answer: chats begin with the role alone."""
    if not body.startswith(b"data: ") or b'"role"' not in body:
        return body.startswith(_EARLY)
    try:
        choices = json.loads(body.removeprefix(b"data: ")).get("choices") or ()
        said = [v for each in choices for k, v in each["delta"].items() if k != "role"]
    except (ValueError, LookupError, AttributeError, TypeError):
        # some other event, or several
        return False
    return bool(choices) and not any(said)


async def refuse(error: RequestError | HttpError, send: Send, tag: str = "") -> None:
    reply = reply_to(error, drain_timeout=1.0)
    headers = {} if reply.retry_after is None else {b"retry-after": str(reply.retry_after)}
    if reply.dropped is not None:
        headers[b"x-llm-d-request-dropped-reason"] = reply.dropped
    if tag:
        headers[_HEADER] = tag
    await send_json(send, reply.status, error_body(reply), headers)


async def send_json(
    send: Send, status: int, body: bytes, headers: Mapping[bytes, str] | None = None
) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    head += [(name, value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


# ------------------------------------------------------------------ explanations


async def _explanation(tag: str) -> dict[str, Any] | None:
    """Return what our own server calls ``usage.timeline``; None: the engine does not know."""
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(_PAUSE)
        for fate in await ask({"fate": tag}):
            if fate["timeline"] is not None:
                timeline = Timeline(**fate["timeline"])
                told = Explanation.of(timeline, fate["ttft"], None, fate["tokens_per_second"])
                found: dict[str, Any] = msgspec.to_builtins(told)
                return found | {"targets": fate["targets"], "violated": fate["violated"]}
    return None


async def _explained(body: bytes, tag: str) -> bytes:
    """Return a part of an answer with the explanation in its usage; unchanged if that is not the
    usage of the whole answer."""
    lines = body.split(b"\n")
    for index, line in enumerate(lines):
        start = b"data: " if line.startswith(b"data: ") else b""
        if not _USAGE.search(line):
            continue
        try:
            event = json.loads(line[len(start) :])
        except ValueError:
            return body
        if not isinstance(event, dict):
            return body
        # the usage lies in the chunk, or in the whole answer that an event carries
        answer = event.get("response")
        holder = answer if isinstance(answer, dict) else event
        is_last = not start or not event.get("choices") or event.get("type") is not None
        if not isinstance(holder.get("usage"), dict) or not is_last:
            continue
        told = await _explanation(tag)
        if told is None:
            return body
        holder["usage"]["timeline"] = told
        lines[index] = start + json.dumps(event, separators=(",", ":")).encode()
    return b"\n".join(lines)


async def send_fate(tag: str, send: Send) -> None:
    """Answer ``GET /paceline/explain/TAG``."""
    for fate in await ask({"fate": tag}):
        refusal = fate["refusal"]
        told = {"refused": refusal} if refusal is not None else await _explanation(tag)
        await send_json(send, 200, json.dumps(told).encode())
        return
    why = f"no engine knows an ended request {show(tag)}; the newest 1,000 are kept"
    error = HttpError(404, why)
    await send_json(send, 404, error_body(reply_to(error, drain_timeout=1.0)))


# ------------------------------------------------------------------ metrics


class WithMetrics:
    """``send`` of ``/metrics``: adds our lines at the end of the answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        assert self._head is not None
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        if self._head["status"] == 200:
            self._body += metrics_lines(await ask({"counts": True}))
        self._head["headers"] = [
            (name, str(len(self._body)).encode() if name.lower() == b"content-length" else value)
            for name, value in self._head["headers"]
        ]
        await self._send(self._head)
        await self._send({"type": "http.response.body", "body": self._body})
