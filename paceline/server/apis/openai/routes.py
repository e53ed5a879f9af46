"""The endpoints that generate text, and the way every generating endpoint is answered."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import InvalidRequestError
from paceline.server.apis.openai.chat import chat_answer, chat_events
from paceline.server.apis.openai.completions import completion_answer, completion_events
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import parse_chat, parse_completion
from paceline.server.transport.endpoint import JSON_BODY, generate
from paceline.server.transport.middleware import read_object
from paceline.server.transport.responses import answering

__all__ = ["generate_router"]


def generate_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def chat_completions(request: Request) -> Response:
        return await generate(service, request, parse_chat, chat_events, chat_answer)

    async def completions(request: Request) -> Response:
        return await generate(
            service, request, parse_completion, completion_events, completion_answer
        )

    async def invocations(request: Request) -> Response:
        body = await read_object(request, service.config)
        if "messages" in body:
            return await generate(service, request, parse_chat, chat_events, chat_answer, body=body)
        if "prompt" in body:
            return await generate(
                service,
                request,
                parse_completion,
                completion_events,
                completion_answer,
                body=body,
            )
        raise InvalidRequestError(
            "a body of /invocations holds messages, as /v1/chat/completions, or a prompt, as "
            "/v1/completions",
            "messages",
        )

    for path, handler in (
        ("/invocations", invocations),
        ("/v1/chat/completions", chat_completions),
        ("/v1/completions", completions),
    ):
        router.add_api_route(
            path,
            answering(service, handler),
            methods=["POST"],
            response_model=None,
            openapi_extra=JSON_BODY,
        )
    return router
