"""The routes of vectors, under the names that callers of vLLM, Cohere and Jina have for them."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.http.sse import unless_disconnected
from paceline.server.bodies.targets import CALLER_FIELDS, named_tenant, with_headers
from paceline.server.exchange import read_object, request_id_of, tenant_of
from paceline.server.openai.routes import JSON_BODY, with_ignored
from paceline.server.responding import answering, json_response
from paceline.server.service import Service

__all__ = ["pooling_router"]

# endpoints, and the names of each
_PATHS: Final = {
    "embeddings": ("/v1/embeddings",),
    "rerank": ("/rerank", "/v1/rerank", "/v2/rerank"),
    "score": ("/score", "/v1/score"),
    "classify": ("/classify",),
    "pooling": ("/pooling",),
}


def pooling_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def run(endpoint: str, request: Request) -> Response:
        # only here: most servers generate, and start sooner without the rest of this folder
        from paceline.server.pooling.endpoints import ENDPOINTS

        arrival = time.monotonic()
        service.refuse_if_draining()
        parse, answer = ENDPOINTS[endpoint]
        body = with_headers(await read_object(request, service.config), request.headers)
        tenant = tenant_of(request, named_tenant(body, *CALLER_FIELDS))
        parsed = parse(body, service.rules, tenant, service.client.info.pooling)
        whole = answer(service, parsed, request_id_of(request), arrival)
        response = json_response(await unless_disconnected(request.receive, whole))
        return with_ignored(response, parsed.options)

    for endpoint, paths in _PATHS.items():
        for path in paths:
            router.add_api_route(
                path,
                answering(service, partial(run, endpoint)),
                methods=["POST"],
                response_model=None,
                openapi_extra=JSON_BODY,
            )
    return router
