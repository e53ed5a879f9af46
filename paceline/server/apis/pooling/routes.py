"""The routes that return vectors, as callers of vLLM, Cohere, Jina and Ollama know them.

Their code is imported at the first request, or when the app is made for a pooling model: a server
that generates starts without it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.http.errors import Reply, error_response
from paceline.http.sse import unless_disconnected
from paceline.server.generation.service import Service
from paceline.server.transport.endpoint import JSON_BODY, body_of, caller_of, with_ignored
from paceline.server.transport.errors import ollama_error_body
from paceline.server.transport.middleware import request_id_of
from paceline.server.transport.responses import Routes, json_response

if TYPE_CHECKING:
    from paceline.server.apis.pooling.serving import Endpoint

__all__ = ["vector_kind", "vector_router"]

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


def vector_kind(name: str) -> Endpoint[Any]:
    """Return how an endpoint, by its name in ``_PATHS``, parses a body and answers it."""
    from paceline.server.apis.pooling.serving import KINDS

    return KINDS[name]


def vector_router(service: Service) -> Routes:
    routes = Routes(service)
    if service.client.info.pooling is not None:
        vector_kind("embeddings")

    def handler(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            arrival = time.monotonic()
            body, kind = await body_of(service, request), vector_kind(name)
            tenant, info = caller_of(request, body), service.client.info.pooling
            parsed = kind.parse(body, service.rules, tenant, info)
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
