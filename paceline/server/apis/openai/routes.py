"""The endpoints that generate text, and the way every generating endpoint is answered."""

from __future__ import annotations

from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import InvalidRequestError
from paceline.server.apis.openai.chat import chat_answer, chat_events
from paceline.server.apis.openai.completions import completion_answer, completion_events
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import parse_chat, parse_completion
from paceline.server.transport.endpoint import JSON_BODY, generate
from paceline.server.transport.middleware import read_object
from paceline.server.transport.responses import Routes

__all__ = ["generate_router"]

# a body that was read already
_Body: TypeAlias = dict[str, Any] | None


def generate_router(service: Service) -> Routes:
    routes = Routes(service)

    async def chat_completions(request: Request, body: _Body = None) -> Response:
        return await generate(service, request, parse_chat, chat_events, chat_answer, body=body)

    async def completions(request: Request, body: _Body = None) -> Response:
        answer, events = completion_answer, completion_events
        return await generate(service, request, parse_completion, events, answer, body=body)

    async def invocations(request: Request) -> Response:
        body = await read_object(request, service.config)
        if "messages" in body:
            return await chat_completions(request, body)
        if "prompt" in body:
            return await completions(request, body)
        raise InvalidRequestError(
            "a body of /invocations holds messages, as /v1/chat/completions, or a prompt, as "
            "/v1/completions",
            "messages",
        )

    routes.add("POST", "/invocations", invocations, JSON_BODY)
    routes.add("POST", "/v1/chat/completions", chat_completions, JSON_BODY)
    routes.add("POST", "/v1/completions", completions, JSON_BODY)
    return routes
