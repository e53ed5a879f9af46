"""The middleware in vLLM's API server: ``--middleware paceline.vllm.Admission``.

On the way in it moves targets from ``slo`` or headers, the tenant and a tag into ``vllm_xargs``,
which vLLM carries to the engine. On the way out it turns the engine's refusals into 429 with
``Retry-After``. Most requests are refused before vLLM sees them (``foresight``), others by the
engine's own door. There, vLLM can end a request only by an error, which becomes 500, or an error in
a stream whose 200 would be out already. So the response's head is held back until the first body
message that has a part of the answer, and where that is an error the engine is asked what it was.

``POST /paceline/predict`` takes the body of a request, and answers what would become of it.
``GET /paceline/explain/TAG`` tells the fate of a request, whose tag is in each answer's header
``x-paceline-request``. ``/metrics`` gets our lines after vLLM's.

vLLM puts its own middlewares inside this one, so a key has not been checked yet when a body is read
here. Before a caller learns how much waits, vLLM is asked for ``/v1/models`` with its headers. A
tag can't be guessed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

import msgspec

from paceline.core.outputs import Timeline
from paceline.errors import InvalidRequestError, QueueFullError, RequestError
from paceline.http.errors import HttpError, error_body, reply_to
from paceline.http.fields import check_boolean, check_object, show
from paceline.server.protocol.responses import Explanation
from paceline.server.protocol.targets import parse_slo, parse_tenant, with_headers
from paceline.vllm.channel import ask
from paceline.vllm.foresight import best_forecast, early_refusal, question
from paceline.vllm.metrics import metrics_lines
from paceline.vllm.requests import ARGUMENTS, CHARACTERS, TAG, slo_arguments, slo_of, tenant_of

__all__ = ["Admission"]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]

_ROUTES: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
# streams have a usage here only if the caller asks for it
_ASKS_USAGE: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
_PREDICT: Final = "/paceline/predict"
_EXPLAIN: Final = "/paceline/explain/"
_HEADER: Final = b"x-paceline-request"
# longest body that is read here; longer ones are refused
_MOST_BYTES: Final = 64 * 1024 * 1024
# how often, and after how many seconds, the engine is asked again for a fate that it does not know
# yet: a stop string is found in this process, and the engine hears of it later
_TRIES, _PAUSE = 5, 0.02
# events that come before the answer, also before an error: the Responses API tells of a request
# before the engine has seen it
_EARLY: Final = (
    b"event: response.created", b"event: response.in_progress", b"event: message_start",
)  # fmt: skip
# the part of a stream's last messages that has the usage of all of them
_USAGE: Final = re.compile(rb'"usage":\s*\{')


class Admission:
    """ASGI middleware, see the module."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        # behind vLLM's --root-path, the path has that in front
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        method = scope.get("method", "")
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif method == "POST" and path in _ROUTES:
            await self._generate(path, scope, receive, send)
        elif method == "POST" and path == _PREDICT:
            await self._foretell(scope, receive, send)
        elif method == "GET" and path.startswith(_EXPLAIN):
            await _send_fate(path.removeprefix(_EXPLAIN), send)
        elif method == "GET" and path.rstrip("/") == "/metrics":
            # without what the caller accepts, vLLM answers in plain text, to which lines are added
            kept = [pair for pair in scope["headers"] if not pair[0].lower().startswith(b"accept")]
            await self._app(dict(scope) | {"headers": kept}, receive, _Metrics(send))
        else:
            await self._app(scope, receive, send)

    async def _generate(
        self, path: str, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        tag, headers = uuid.uuid4().hex, _headers(scope)
        try:
            raw = await _read(receive)
            if raw is None:
                return
            body = _parse(raw)
            explains = False
            if body is not None:
                explains = check_boolean(body.pop("explain", False), "explain")
                body = _with_arguments(body, headers, tag)
                asked = question(body)
                refusal = await early_refusal(asked, lambda: self._has_key(scope))
                if refusal is not None:
                    await _refuse(refusal, send, tag)
                    return
                if asked["characters"] and not asked["tokens"]:
                    body["vllm_xargs"][CHARACTERS] = asked["characters"]
                if explains and body.get("stream") and path in _ASKS_USAGE:
                    # the explanation is part of the usage, as with our own server
                    options = check_object(body.get("stream_options") or {}, "stream_options")
                    body["stream_options"] = options | {"include_usage": True}
                raw = json.dumps(body).encode()
        except RequestError as error:
            await _refuse(error, send)
            return
        kept = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        kept.append((b"content-length", str(len(raw)).encode()))
        answer = _Answer(send, tag, explains)
        try:
            await self._app(dict(scope) | {"headers": kept}, _again(raw, receive), answer)
        except Exception:
            # the Responses API has no event for an error of the engine, and ends a stream so
            if not await answer.failed():
                raise

    async def _foretell(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        """Answer ``POST /paceline/predict``."""
        try:
            raw = await _read(receive)
            if raw is None:
                return
            body = check_object(_parse(raw), "the body")
            asked = question(_with_arguments(body, _headers(scope), ""))
            if not await self._has_key(scope):
                raise HttpError(401, "vLLM does not know this caller's key")
            told = await best_forecast(asked)
            if told is None:
                raise HttpError(503, "no engine answered")
        except (RequestError, HttpError) as error:
            await _refuse(error, send)
            return
        seconds = told["predicted_ttft"]
        answer = {
            "accepted": told["refusal"] is None, "prompt_tokens": told["prompt_tokens"],
            "predicted_ttft_ms": None if seconds is None else round(1e3 * seconds, 3),
            "refused": told["refusal"],
        }  # fmt: skip
        await _send_json(send, 200, json.dumps(answer).encode())

    async def _has_key(self, scope: Mapping[str, Any]) -> bool:
        """Whether vLLM answers this caller."""
        path = scope.get("root_path", "") + "/v1/models"
        statuses = []

        async def receive() -> _Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: _Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        asked = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await self._app(dict(scope) | asked, receive, send)
        return statuses == [200]


# ------------------------------------------------------------------ the way in


async def _read(receive: _Receive) -> bytes | None:
    """Return the whole body; None if the caller hung up. Raises InvalidRequestError."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _MOST_BYTES:
            raise InvalidRequestError(f"the body is longer than {_MOST_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


def _headers(scope: Mapping[str, Any]) -> dict[str, str]:
    pairs = scope["headers"]
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}


def _again(body: bytes, receive: _Receive) -> _Receive:
    """Return a ``receive`` that gives the body at once, and then what follows it."""
    given = False

    async def receive_again() -> _Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _parse(raw: bytes) -> dict[str, Any] | None:
    """Return the body's object; None if it is none, which vLLM refuses in its own words."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _with_arguments(body: dict[str, Any], headers: Mapping[str, str], tag: str) -> dict[str, Any]:
    """Return the body for vLLM, with our part in ``vllm_xargs``. Raises InvalidRequestError."""
    given = check_object({} if (value := body.get("vllm_xargs")) is None else value, "vllm_xargs")
    _check_agree(body, headers)
    slo = parse_slo(with_headers(body, headers).get("slo"))
    # what the caller put there itself is checked as well
    slo_of(given)
    own = slo_arguments(slo, parse_tenant(headers) or tenant_of(given) or _key_tenant(headers))
    for name in set(own) & set(given) & set(ARGUMENTS):
        if own[name] != given[name]:
            who = "a header" if name == "tenant" else "slo"
            why = f"{who} says {show(own[name])} and vllm_xargs says {show(given[name])}"
            raise InvalidRequestError(f"{name} differs: {why}", f"vllm_xargs.{name}")
    body = {name: value for name, value in body.items() if name != "slo"}
    body["vllm_xargs"] = given | own | {TAG: tag}
    return body


def _check_agree(body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """Raise InvalidRequestError if a target of the body differs from that of a header."""
    slo = body.get("slo")
    if not isinstance(slo, dict):
        return
    named = with_headers({}, headers).get("slo", {})
    for name, value in named.items():
        own = slo.get(name)
        if own is not None and own != value:
            why = f"the body says {show(own)} and a header says {show(value)}"
            raise InvalidRequestError(f"slo.{name} differs: {why}", f"slo.{name}")


def _key_tenant(headers: Mapping[str, str]) -> str:
    """Return a name for the caller's key, from which the key does not follow; "" without one."""
    key = headers.get("authorization") or headers.get("x-api-key")
    return "key:" + hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""


# ------------------------------------------------------------------ the way out


class _Answer:
    """``send`` of one request: holds the head back until the first part of the answer."""

    def __init__(self, send: _Send, tag: str, explains: bool) -> None:
        self._send, self._tag, self._explains = send, tag, explains
        self._head: _Message | None = None
        # whether the head was sent
        self._begun = False
        # messages that were held back with the head
        self._early: list[_Message] = []
        # the rest of an answer that was replaced by a refusal is dropped
        self._replaced = False

    async def __call__(self, message: _Message) -> None:
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
            await _refuse(error, self._send, self._tag)
            return True
        return False

    def _set_length(self, more: int) -> None:
        if self._head is None:
            return
        self._head["headers"] = [
            (name, str(int(value) + more).encode() if name.lower() == b"content-length" else value)
            for name, value in self._head.get("headers", ())
        ]


def _is_error(head: _Message, message: _Message) -> bool:
    """Whether an answer's first part may tell of the engine's refusal."""
    status, body = head["status"], message.get("body", b"")
    return status >= 500 or (status == 200 and b'"error"' in body[:1024])


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


async def _refuse(error: RequestError | HttpError, send: _Send, tag: str = "") -> None:
    reply = reply_to(error, drain_timeout=1.0)
    headers = {} if reply.retry_after is None else {b"retry-after": str(reply.retry_after)}
    if reply.dropped is not None:
        headers[b"x-llm-d-request-dropped-reason"] = reply.dropped
    if tag:
        headers[_HEADER] = tag
    await _send_json(send, reply.status, error_body(reply), headers)


async def _send_json(
    send: _Send, status: int, body: bytes, headers: Mapping[bytes, str] | None = None
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
        # the usage lies in the chunk, or in the whole answer that an event carries
        holder = event.get("response") or event
        is_last = not start or not event.get("choices") or event.get("type") is not None
        if not isinstance(holder.get("usage"), dict) or not is_last:
            continue
        told = await _explanation(tag)
        if told is None:
            return body
        holder["usage"]["timeline"] = told
        lines[index] = start + json.dumps(event, separators=(",", ":")).encode()
    return b"\n".join(lines)


async def _send_fate(tag: str, send: _Send) -> None:
    """Answer ``GET /paceline/explain/TAG``."""
    for fate in await ask({"fate": tag}):
        refusal = fate["refusal"]
        told = {"refused": refusal} if refusal is not None else await _explanation(tag)
        await _send_json(send, 200, json.dumps(told).encode())
        return
    why = f"no engine knows an ended request {show(tag)}; the newest 1,000 are kept"
    error = HttpError(404, why)
    await _send_json(send, 404, error_body(reply_to(error, drain_timeout=1.0)))


# ------------------------------------------------------------------ metrics


class _Metrics:
    """``send`` of ``/metrics``: adds our lines at the end of the answer."""

    def __init__(self, send: _Send) -> None:
        self._send = send
        self._head: _Message | None = None
        self._body = b""

    async def __call__(self, message: _Message) -> None:
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
