"""The routes of vectors, under the names that callers of vLLM, Cohere and Jina have for them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.pooling import PoolingInfo
from paceline.http.sse import unless_disconnected
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.targets import CALLER_FIELDS, named_tenant, with_headers
from paceline.server.exchange import read_object, request_id_of, tenant_of
from paceline.server.openai.routes import JSON_BODY, with_ignored
from paceline.server.pooling.bodies import (
    PoolingOptions,
    RerankRequest,
    parse_classify,
    parse_embeddings,
    parse_pooling,
    parse_rerank,
    parse_score,
)
from paceline.server.pooling.endpoints import (
    classify_answer,
    embeddings_answer,
    pooling_answer,
    rerank_answer,
    score_answer,
)
from paceline.server.responding import answering, json_response
from paceline.server.service import Service

__all__ = ["pooling_router"]

# what is one endpoint by several names
_EMBEDDINGS: Final = ("/v1/embeddings",)
_RERANK: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
_SCORE: Final = ("/score", "/v1/score")


class _Parsed(Protocol):
    @property
    def options(self) -> PoolingOptions: ...


_R = TypeVar("_R", bound=_Parsed | RerankRequest)


def pooling_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def run(
        request: Request,
        parse: Callable[[dict[str, Any], RequestRules, str, PoolingInfo | None], _R],
        answer: Callable[[Service, _R, str, float], Awaitable[bytes]],
    ) -> Response:
        arrival = time.monotonic()
        service.refuse_if_draining()
        body = with_headers(await read_object(request, service.config), request.headers)
        tenant = tenant_of(request, named_tenant(body, *CALLER_FIELDS))
        parsed = parse(body, service.rules, tenant, service.client.info.pooling)
        whole = answer(service, parsed, request_id_of(request), arrival)
        response = json_response(await unless_disconnected(request.receive, whole))
        options = parsed.score.options if isinstance(parsed, RerankRequest) else parsed.options
        return with_ignored(response, options)

    async def embeddings(request: Request) -> Response:
        return await run(request, parse_embeddings, embeddings_answer)

    async def pooling(request: Request) -> Response:
        return await run(request, parse_pooling, pooling_answer)

    async def classify(request: Request) -> Response:
        return await run(request, parse_classify, classify_answer)

    async def score(request: Request) -> Response:
        return await run(request, parse_score, score_answer)

    async def rerank(request: Request) -> Response:
        return await run(request, parse_rerank, rerank_answer)

    for paths, handler in (
        (_EMBEDDINGS, embeddings),
        (_RERANK, rerank),
        (_SCORE, score),
        (("/classify",), classify),
        (("/pooling",), pooling),
    ):
        for path in paths:
            router.add_api_route(
                path,
                answering(service, handler),
                methods=["POST"],
                response_model=None,
                openapi_extra=JSON_BODY,
            )
    return router
