"""The middleware in vLLM's API server: ``--middleware paceline.vllm.Admission``.

On the way in it moves targets from ``slo`` or headers, the tenant and a tag into ``vllm_xargs``,
which vLLM carries to the engine. On the way out it turns the engine's refusals into 429 with
``Retry-After``. Most requests are refused before vLLM sees them (``foresight``), others by the
engine's own door. There, vLLM can end a request only by an error, which becomes 500, or an error in
a stream whose 200 would be out already. So the response's head is held back until the first body
message that has a part of the answer, and where that is an error the engine is asked what it was.

``POST /paceline/predict`` takes the body of a request, and answers what would become of it.
``GET /paceline/explain/TAG`` tells the fate of a request, whose tag is in each answer's header
``x-paceline-request``. ``/metrics`` gets our lines after vLLM's, and ``/ui`` is our page.

vLLM puts its own middlewares inside this one, so a key has not been checked yet when a body is read
here. Before a caller learns how much waits, vLLM is asked for ``/v1/models`` with its headers. A
tag can't be guessed.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from paceline.errors import InvalidRequestError, RequestError
from paceline.http.errors import HttpError
from paceline.http.fields import check_boolean, check_object, show
from paceline.server.protocol.targets import parse_slo, parse_tenant, with_headers
from paceline.vllm.answers import (
    Answer,
    Message,
    Receive,
    Send,
    WithMetrics,
    refuse,
    send_fate,
    send_json,
)
from paceline.vllm.foresight import best_forecast, early_refusal, question
from paceline.vllm.requests import ARGUMENTS, CHARACTERS, TAG, slo_arguments, slo_of, tenant_of

__all__ = ["Admission"]

_App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_ROUTES: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
# streams have a usage here only if the caller asks for it
_ASKS_USAGE: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
_PREDICT: Final = "/paceline/predict"
_EXPLAIN: Final = "/paceline/explain/"
# longest body that is read here; longer ones are refused
_MOST_BYTES: Final = 64 * 1024 * 1024


class Admission:
    """ASGI middleware, see the module."""

    def __init__(self, app: _App) -> None:
        self._app = app
        # made when a browser first asks for it
        self._page: Any = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        # behind vLLM's --root-path, the path has that in front
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        method = scope.get("method", "")
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif method == "POST" and path in _ROUTES:
            await self._generate(path, scope, receive, send)
        elif method == "POST" and path == _PREDICT:
            await self._foretell(scope, receive, send)
        elif method == "GET" and (path == "/ui" or path.startswith("/ui/")):
            await self._show(path, scope, receive, send)
        elif method == "GET" and path.startswith(_EXPLAIN):
            await send_fate(path.removeprefix(_EXPLAIN), send)
        elif method == "GET" and path.rstrip("/") == "/metrics":
            # without what the caller accepts, vLLM answers in plain text, to which lines are added
            kept = [pair for pair in scope["headers"] if not pair[0].lower().startswith(b"accept")]
            await self._app(dict(scope) | {"headers": kept}, receive, WithMetrics(send))
        else:
            await self._app(scope, receive, send)

    async def _generate(
        self, path: str, scope: MutableMapping[str, Any], receive: Receive, send: Send
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
                    await refuse(refusal, send, tag)
                    return
                if asked["characters"] and not asked["tokens"]:
                    body["vllm_xargs"][CHARACTERS] = asked["characters"]
                if explains and body.get("stream") and path in _ASKS_USAGE:
                    # the explanation is part of the usage, as with our own server
                    options = check_object(body.get("stream_options") or {}, "stream_options")
                    body["stream_options"] = options | {"include_usage": True}
                raw = json.dumps(body).encode()
        except RequestError as error:
            await refuse(error, send)
            return
        kept = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        kept.append((b"content-length", str(len(raw)).encode()))
        answer = Answer(send, tag, explains)
        try:
            await self._app(dict(scope) | {"headers": kept}, _again(raw, receive), answer)
        except Exception:
            # the Responses API has no event for an error of the engine, and ends a stream so
            if not await answer.failed():
                raise

    async def _foretell(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        """Answer ``POST /paceline/predict``."""
        try:
            raw = await _read(receive)
            if raw is None:
                return
            body = check_object(_parse(raw), "the body")
            asked = question(_with_arguments(body, _headers(scope), ""))
            await self._check_key(scope)
            told = await best_forecast(asked)
            if told is None:
                raise HttpError(503, "no engine answered")
        except (RequestError, HttpError) as error:
            await refuse(error, send)
            return
        seconds = told["predicted_ttft"]
        answer = {
            "accepted": told["refusal"] is None, "prompt_tokens": told["prompt_tokens"],
            "predicted_ttft_ms": None if seconds is None else round(1e3 * seconds, 3),
            "refused": told["refusal"],
        }  # fmt: skip
        await send_json(send, 200, json.dumps(answer).encode())

    async def _show(
        self, path: str, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        """Answer a browser that asks for the page."""
        if self._page is None:
            # seconds on a busy machine
            module = await asyncio.to_thread(importlib.import_module, "paceline.vllm.page")
            self._page = self._page or module.Page()
        try:
            if path == "/ui/api/promises":
                await self._check_key(scope)
                _, metrics = await self._get("/metrics", scope)
                answer = self._page.promises(scope.get("query_string", b"").decode(), metrics)
            else:
                answer = self._page.file(scope, path)
        except HttpError as error:
            await refuse(error, send)
            return
        await answer(scope, receive, send)

    async def _check_key(self, scope: Mapping[str, Any]) -> None:
        if not await self._has_key(scope):
            raise HttpError(401, "vLLM does not know this caller's key")

    async def _has_key(self, scope: Mapping[str, Any]) -> bool:
        """Whether vLLM answers this caller."""
        return (await self._get("/v1/models", scope))[0] == 200

    async def _get(self, path: str, scope: Mapping[str, Any]) -> tuple[int, bytes]:
        """Return status and body of a GET with a request's headers."""
        path = scope.get("root_path", "") + path
        statuses, parts = [], []

        async def waits() -> Message:
            # a middleware that watches for the caller's end must find none
            never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            return await never

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            else:
                parts.append(message.get("body", b""))

        asked = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await self(dict(scope) | asked, _again(b"", waits), send)
        return statuses[0], b"".join(parts)


# ------------------------------------------------------------------ the way in


async def _read(receive: Receive) -> bytes | None:
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


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body at once, and then what follows it."""
    given = False

    async def receive_again() -> Message:
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
    # it is counted here, and others' forecasts depend on it
    body["vllm_xargs"].pop(CHARACTERS, None)
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
