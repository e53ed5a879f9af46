"""Answers of handlers: bodies encoded as JSON, and every error in one format.

The 404 of a route that other servers have and this one does not says why.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from paceline.http.errors import HttpError, Reply, error_response, reply_to
from paceline.http.fields import show
from paceline.server.generation.service import Handler, Service
from paceline.server.protocol.responses import encode
from paceline.server.transport.middleware import request_id_of

__all__ = [
    "UNSERVED_METHODS",
    "UNSERVED_ROUTES",
    "Handler",
    "Routes",
    "answering",
    "encoded",
    "http_exception",
    "json_response",
    "why_unserved",
]

_TEXT: Final = "text models only"
_SEVERAL: Final = "several requests, n, or /v1/completions with several prompts"
_RENDERED: Final = "/tokenize renders and tokenises"
_DEVELOPMENT: Final = "vLLM's own are for development"

# by path: the method, and why it is missing or what replaces it
UNSERVED_ROUTES: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys(
        (
            "/v2/embed",
            "/embedding",
            "/embeddings",
        ),
        ("POST", "/v1/embeddings gives embeddings"),
    ),
    **dict.fromkeys(("/reranking", "/v1/reranking"), ("POST", "/v1/rerank ranks documents")),
    **dict.fromkeys(
        (
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/moderations",
            "/v1/images/generations",
        ),
        ("POST", _TEXT),
    ),
    "/v1/realtime": ("GET", _TEXT),
    **dict.fromkeys(
        ("/v1/chat/completions/batch", "/v1/decisions", "/generative_scoring"), ("POST", _SEVERAL)
    ),
    **dict.fromkeys(("/v1/completions/render", "/v1/chat/completions/render"), ("POST", _RENDERED)),
    **dict.fromkeys(
        (
            "/sleep",
            "/wake_up",
            "/pause",
            "/resume",
            "/reset_prefix_cache",
            "/collective_rpc",
            "/start_profile",
            "/stop_profile",
        ),
        ("POST", _DEVELOPMENT),
    ),
    **dict.fromkeys(("/is_sleeping", "/is_paused", "/server_info"), ("GET", _DEVELOPMENT)),
}
# methods that llama-server has on paths that this server serves with other methods
UNSERVED_METHODS: Final[dict[tuple[str, str], str]] = {
    ("POST", "/props"): "the flags of paceline serve say how the server is",
}


def why_unserved(path: str, method: str) -> str | None:
    """Return the message of a 404 or 405; None for a path that no known server has."""
    method, why = UNSERVED_ROUTES.get(path, (method, UNSERVED_METHODS.get((method, path), "")))
    if path.startswith("/slots/"):
        why = "there are no slots whose cache could be saved: all requests share the prefix cache"
    return f"{method} {path[:80]} is not served here: {why}" if why else None


_log = logging.getLogger("paceline.server")

_METHODS: Final = ("DELETE", "GET", "PATCH", "POST", "PUT")

# makes the answer to an error from the reply and the request's id
Respond: TypeAlias = Callable[[Reply, str], Response]


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


class Routes(APIRouter):
    """A router all of whose handlers are ``answering``."""

    def __init__(self, service: Service, respond: Respond = lambda reply, _: error_response(reply)):
        super().__init__()
        self._service, self._respond = service, respond

    def add(
        self,
        method: str,
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        extra: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Add a route; ``extra`` goes into its OpenAPI operation, ``more`` to FastAPI."""
        respond, service = more.pop("respond", self._respond), self._service
        answer = service.handlers[method, path] = answering(service, handler, respond)
        if service.models is not None:
            routed = service.models.routed(method, path, answer)
            # what a model's own handler raised is an answer already
            answer = answer if routed is answer else answering(service, routed, respond)
        self.add_api_route(
            path, answer, methods=[method], response_model=None, openapi_extra=extra, **more
        )


def answering(
    service: Service,
    handler: Callable[[Request], Awaitable[Response]],
    respond: Respond = lambda reply, _: error_response(reply),
) -> Handler:
    """Return ``handler``, with every exception turned into an answer and a log line.

    Args:
        respond: makes the answer to an error from the reply and the request's id.
    """

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            reply = reply_to(error, drain_timeout=service.config.drain_timeout)
            _log.info(
                "refused id=%s path=%s status=%d param=%s",
                request_id_of(request),
                # a caller may send control characters
                ascii(request.scope["path"])[1:-1],
                reply.status,
                reply.param,
            )
            return respond(reply, request_id_of(request))

    # names for /docs; functools.wraps would also pass on parameters that FastAPI calls by keyword
    answer.__name__ = answer.__qualname__ = getattr(handler, "__name__", "handler")
    return answer


async def http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router itself refuses (404, 405), in the format of all errors."""
    assert isinstance(error, HTTPException), "registered for HTTPException alone"
    path = request.scope["path"]
    said = str(error.detail)
    if error.status_code in (404, 405):
        known = error.status_code == 405
        said = why_unserved(path, request.method) or (
            f"{show(path)} is not served with {request.method}"
            if known
            else f"there is no {request.method} {show(path)}"
        )
    response = error_response(reply_to(HttpError(error.status_code, said), drain_timeout=0.0))
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        # the router names only the methods of the path's first route
        allowed = [method for method in _METHODS if _is_served(request, method)]
        if "GET" in allowed:
            # HEAD is answered like GET (``middleware.py``)
            allowed.insert(allowed.index("GET") + 1, "HEAD")
        response.headers["Allow"] = ", ".join(allowed)
    return response


def _is_served(request: Request, method: str) -> bool:
    """Return whether the request's path has that method. If a route matches the path literally,
    routes that match it with a parameter are ignored."""
    scope = {**request.scope, "method": method, "path_params": {}}
    found = [
        (match, bool(child.get("path_params")))
        for route in _leaves(request.app.routes)
        for match, child in (route.matches(scope),)
        if match is not Match.NONE
    ]
    named = not all(has_parameters for _, has_parameters in found)
    return any(match is Match.FULL and not (named and varies) for match, varies in found)


def _leaves(routes: Iterable[Any]) -> Iterator[Any]:
    """Yield the routes, also those of included routers, which FastAPI keeps nested."""
    for route in routes:
        inner = getattr(getattr(route, "original_router", route), "routes", None)
        yield from _leaves(inner) if inner else (route,)


def encoded(value: Any) -> Response:
    """Return an answer of any value msgspec can write."""
    return json_response(encode(value))
