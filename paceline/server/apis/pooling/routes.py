"""The routes that return vectors, as callers of vLLM, Cohere, Jina and Ollama know them.

Their code is imported at the first request, or when the app is made for a pooling model: a server
that generates starts without it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response

from paceline.core.pooling import PoolingInfo
from paceline.http.errors import Reply, error_response
from paceline.http.sse import unless_disconnected
from paceline.server.generation.service import Service
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.targets import CALLER_FIELDS, named_tenant, with_headers
from paceline.server.transport.endpoint import JSON_BODY, HasIgnored, with_ignored
from paceline.server.transport.errors import ollama_error_body
from paceline.server.transport.middleware import read_object, request_id_of, tenant_of
from paceline.server.transport.responses import Routes, json_response

__all__ = ["Kind", "Parsed", "vector_kind", "vector_router"]

# the paths of each endpoint
_PATHS: Final = {
    "embeddings": ("/v1/embeddings",),
    "rerank": ("/rerank", "/v1/rerank", "/v2/rerank"),
    "score": ("/score", "/v1/score"),
    "classify": ("/classify",),
    "pooling": ("/pooling",),
    "ollama_embed": ("/api/embed",),
    "ollama_embeddings": ("/api/embeddings",),
}


class Parsed(Protocol):
    @property
    def options(self) -> HasIgnored: ...


class Kind(Protocol):
    """How one endpoint parses a body and answers it."""

    def parse(
        self, values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None, /
    ) -> Parsed: ...

    def answer(
        self, service: Service, parsed: Any, request_id: str, arrival: float, /
    ) -> Awaitable[bytes]: ...


def vector_kind(name: str) -> Kind:
    """Return the kind of a name of ``_PATHS``."""
    from paceline.server.apis.pooling.serving import KINDS

    return KINDS[name]


def vector_router(service: Service) -> Routes:
    routes = Routes(service)
    if service.client.info.pooling is not None:
        vector_kind("embeddings")

    def handler(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            arrival = time.monotonic()
            service.refuse_if_draining()
            kind = vector_kind(name)
            body = with_headers(await read_object(request, service.config), request.headers)
            tenant = tenant_of(request, named_tenant(body, *CALLER_FIELDS))
            parsed = kind.parse(body, service.rules, tenant, service.client.info.pooling)
            whole = kind.answer(service, parsed, request_id_of(request), arrival)
            response = json_response(await unless_disconnected(request.receive, whole))
            return with_ignored(response, parsed.options)

        handle.__name__ = name
        return handle

    def of_ollama(reply: Reply, _request_id: str) -> Response:
        return error_response(reply, ollama_error_body(reply))

    for name, paths in _PATHS.items():
        respond = {"respond": of_ollama} if name.startswith("ollama") else {}
        for path in paths:
            routes.add("POST", path, handler(name), JSON_BODY, **respond)
    return routes
