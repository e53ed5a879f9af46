"""Middleware around every request: request ids, keys, limits and metrics."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable
from typing import Any, Final
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.http import body
from paceline.http.body_writer import BODY_WRITER, BodyWriter
from paceline.http.errors import HttpError
from paceline.http.keys import OPEN_PATHS
from paceline.http.rate_limits.limiter import Ticket, caller_of
from paceline.http.web import refuse_other_origins
from paceline.server.generation.service import Service
from paceline.server.generation.template_gaps import REWRITTEN
from paceline.server.protocol.targets import parse_tenant
from paceline.server.settings.config import ServerConfig
from paceline.server.transport.errors import refusal

__all__ = [
    "GENERATE_PATHS",
    "ExchangeMiddleware",
    "keep_object",
    "may_administer",
    "principal_of",
    "read_json",
    "read_object",
    "request_id_of",
    "tenant_of",
]

_log = logging.getLogger("paceline.server")

# paths whose requests count as in flight until their last byte is sent
GENERATE_PATHS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/inference/v1/generate",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/completion",
        "/completions",
        "/infill",
        "/v1/embeddings",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/v1/score",
        "/classify",
        "/pooling",
    }
)
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# probes poll these all the time
_UNCOUNTED: Final = frozenset(
    {"/metrics", "/health", "/health/live", "/health/ready", "/load", "/ping", "/version"}
)
# names the messages that the chat template could not show unchanged
_REWRITTEN_HEADER: Final = b"x-paceline-rewritten-messages"
_STATUS_GONE: Final = 499
# the part of the idle timeout that the Keep-Alive header announces
_ANNOUNCED: Final = 0.95


class ExchangeMiddleware:
    """Gives every HTTP exchange an id, echoed as ``X-Request-Id``, and counts it.

    Plain ASGI, so that a streamed chunk passes through one extra function and no queue.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        seconds = service.config.bounds.keep_alive_timeout
        # slightly less than the timeout, so that a client that heeds it is never too late
        announced = b"timeout=%d" % int(seconds * _ANNOUNCED)
        self._closing = (b"connection", b"close")
        self._keeping = (b"keep-alive", announced) if seconds else self._closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":
            # treated as GET: routes do not define HEAD, and the connection leaves the body out
            scope = {**scope, "method": "GET"}
        request_id = _caller_id(scope) or uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        generates = scope["path"] in GENERATE_PATHS
        if generates:
            self._service.enter()
            if self._service.tracing is not None:
                self._service.tracing.arrive(scope)
        status = _STATUS_GONE
        sent = 0
        started = time.monotonic()
        rewritten: dict[str, None] = {}
        REWRITTEN.set(rewritten)

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                ticket: Ticket | None = scope["state"].get("ticket")
                limits = () if ticket is None else ticket.headers()
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id),
                    self._closing if self._service.is_ending else self._keeping,
                    *limits,
                    *([(_REWRITTEN_HEADER, "; ".join(rewritten).encode())] if rewritten else ()),
                ]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            refusal = await self._refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            if generates:
                self._service.leave()
            handler = _handler(scope)
            if handler not in _UNCOUNTED:
                method = method if method in _METHODS else "OTHER"
                seconds = time.monotonic() - started
                self._service.metrics.observe_http(
                    handler,
                    method,
                    status,
                    seconds,
                    request_bytes=_declared_bytes(scope),
                    response_bytes=sent + _written_directly(scope),
                )
            # the writer refers back to this scope: without the cycle the scope is freed at once and
            # not by the garbage collector
            scope.get("extensions", {}).pop(BODY_WRITER, None)

    async def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a caller that is refused: without a valid key, above its limit, or
        in a page of another origin. Otherwise note the caller."""
        try:
            refuse_other_origins(scope, self._service.config.cors_origins)
            key = self._service.keys.check(scope["path"], Headers(scope=scope))
            await self._count(scope, "" if key is None else key.name)
        except HttpError as error:
            _log.info(
                "refused id=%s status=%d client=%s",
                scope["state"]["request_id"],
                error.status,
                (scope.get("client") or ("",))[0],
            )
            return refusal(error, scope["path"], scope["state"]["request_id"])
        if key is not None:
            scope["state"]["principal"] = key.name
            scope["state"]["speaks_for_others"] = key.scope == "admin"
        return None

    async def _count(self, scope: Scope, principal: str) -> None:
        """Count every POST except a probe's. Raises HttpError 429."""
        limiter = self._service.limiter
        if limiter is None or scope["method"] != "POST" or scope["path"] in OPEN_PATHS:
            return
        ticket = limiter.ticket(caller_of(principal, scope.get("client")))
        if ticket is not None:
            scope["state"]["ticket"] = ticket
            await limiter.enter(ticket)


def may_administer(request: Request) -> bool:
    """Tell whether the caller has a key of scope admin, or the server has no keys."""
    state = request.scope["state"]
    return not state.get("principal") or bool(state["speaks_for_others"])


def tenant_of(request: Request, named: str) -> str:
    """Return the tenant, for fairness: the key's name; or, without keys or with an admin's key (a
    gateway's), the one that a header names, or else the body (``named``)."""
    state = request.scope["state"]
    principal: str = state.get("principal", "")
    if principal and not state["speaks_for_others"]:
        return principal
    return parse_tenant(request.headers) or named or principal


def _caller_id(scope: Scope) -> bytes | None:
    """Return the caller's own id if it can be echoed: printable ASCII, at most 128 characters."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given: bytes = value
            return given if _REQUEST_ID.fullmatch(given) else None
    return None


def _declared_bytes(scope: Scope) -> int:
    """Return the value of Content-Length; 0 if it is absent or invalid."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) <= 18 else 0
    return 0


def _written_directly(scope: Scope) -> int:
    """Return the bytes of the answer that bypassed ``send``."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER)
    return 0 if writer is None else writer.num_bytes


def _handler(scope: Scope) -> str:
    """Return the route's template. Paths from callers must not become labels."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "none"


def request_id_of(request: Request) -> str:
    """Return the id that ``ExchangeMiddleware`` gave."""
    request_id: str = request.state.request_id
    return request_id


def principal_of(request: Request) -> str:
    """Return the name of the caller's API key, "" where no keys are required."""
    principal: str = request.scope["state"].get("principal", "")
    return principal


def read_json(request: Request, config: ServerConfig) -> Awaitable[bytes]:
    """Read a body within the bounds of ``config``, not yet decoded."""
    return body.read_json(request, config.max_body_bytes, config.bounds)


async def read_object(request: Request, config: ServerConfig) -> dict[str, Any]:
    """Read a JSON body within the bounds of ``config``; see ``http.body.read_object``. One that was
    read already, to find the model that it names, is handed over once (``keep_object``)."""
    kept: dict[str, Any] | None = request.scope["state"].pop("body", None)
    if kept is not None:
        return kept
    return await body.read_object(request, config.max_body_bytes, config.bounds)


def keep_object(request: Request, value: dict[str, Any]) -> None:
    """Keep a body for the next ``read_object``."""
    request.scope["state"]["body"] = value
