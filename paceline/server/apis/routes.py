"""The endpoints of OpenAI's chat, completions and Responses, of Messages, and of token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.types import GenerationOutput
from paceline.errors import InvalidRequestError
from paceline.http.errors import Reply, error_response
from paceline.http.shortcut import Shortcut
from paceline.server.apis.anthropic import (
    CountTokensBody,
    count_tokens,
    messages_answer,
    messages_events,
    parse_messages_api,
)
from paceline.server.apis.openai.chat import chat_answer, chat_events
from paceline.server.apis.openai.completions import completion_answer, completion_events
from paceline.server.apis.responses.protocol import ResponsesRequest, parse_responses, previous_id
from paceline.server.apis.responses.serving import (
    cancel_response,
    failed_event,
    input_items,
    response_answer,
    response_events,
)
from paceline.server.apis.token_ids import parse_token_generate, token_answer, token_events
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import parse_chat, parse_completion
from paceline.server.protocol.targets import named_tenant
from paceline.server.transport.endpoint import (
    JSON_BODY,
    Events,
    body_of,
    caller_of,
    generate,
    respond,
    with_ignored,
)
from paceline.server.transport.errors import anthropic_error_body
from paceline.server.transport.middleware import principal_of, request_id_of, tenant_of
from paceline.server.transport.responses import Handler, Routes, encoded, json_response

__all__ = ["generate_router", "other_apis_router"]

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
        body = await body_of(service, request)
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


_P = TypeVar("_P")


def _usual(
    events: Callable[[Service, _P, str, float], AsyncGenerator[bytes, None]],
) -> Events[_P]:
    """Wrap ``events`` to ignore the shortcut: one output may be several of these APIs' events."""

    def without_shortcut(
        service: Service, parsed: _P, request_id: str, arrival: float, _: Shortcut[GenerationOutput]
    ) -> AsyncGenerator[bytes, None]:
        return events(service, parsed, request_id, arrival)

    return without_shortcut


def other_apis_router(service: Service) -> Routes:
    routes = Routes(service)

    async def generate_tokens(request: Request) -> Response:
        return await generate(service, request, parse_token_generate, token_events, token_answer)

    async def messages(request: Request) -> Response:
        arrival = time.monotonic()
        body = await body_of(service, request)
        named = named_tenant(body.get("metadata"), "user_id")
        parsed = parse_messages_api(body, service.rules, tenant_of(request, named))
        request_id = request_id_of(request)

        def failed(reply: Reply) -> bytes:
            return b"event: error\ndata: %b\n\n" % anthropic_error_body(reply, request_id)

        events = _usual(messages_events)
        return await respond(
            service, request, parsed, parsed.options, arrival, events, messages_answer, failed
        )

    async def messages_count_tokens(request: Request) -> Response:
        asked = CountTokensBody.read(await body_of(service, request), service.rules)
        return with_ignored(json_response(await count_tokens(service, asked)), asked)

    def responses_request(request: Request, body: dict[str, Any]) -> ResponsesRequest:
        owner = principal_of(request)
        previous = previous_id(body)
        before = [] if previous is None else service.responses.conversation(previous, owner)
        tenant = caller_of(request, body)
        return parse_responses(body, service.rules, tenant, before=before, owner=owner)

    async def responses(request: Request) -> Response:
        arrival = time.monotonic()
        parsed = responses_request(request, await body_of(service, request))
        events, options = _usual(response_events), parsed.chat.options
        return await respond(
            service, request, parsed, options, arrival, events, response_answer, failed_event
        )

    async def response_get(request: Request) -> Response:
        found = service.responses.get(request.path_params["response_id"], principal_of(request))
        return encoded(found.body)

    async def response_input_items(request: Request) -> Response:
        found = service.responses.get(request.path_params["response_id"], principal_of(request))
        return json_response(input_items(found, request.query_params))

    async def response_input_tokens(request: Request) -> Response:
        parsed = responses_request(request, await body_of(service, request))
        prompt = await service.prompts.chat(
            parsed.chat.template, add_special_tokens=parsed.chat.options.add_special_tokens
        )
        answer = encoded({"object": "response.input_tokens", "input_tokens": len(prompt)})
        return with_ignored(answer, parsed.chat.options)

    async def response_delete(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        service.responses.delete(response_id, principal_of(request))
        return encoded({"id": response_id, "object": "response", "deleted": True})

    async def response_cancel(request: Request) -> Response:
        found = service.responses.get(request.path_params["response_id"], principal_of(request))
        return encoded(await cancel_response(found))

    def anthropic_response(reply: Reply, request_id: str) -> Response:
        return error_response(reply, anthropic_error_body(reply, request_id))

    def add(path: str, handler: Handler, method: str = "POST", **more: Any) -> None:
        routes.add(method, path, handler, JSON_BODY if method == "POST" else None, **more)

    add("/v1/messages", messages, respond=anthropic_response)
    add("/v1/messages/count_tokens", messages_count_tokens, respond=anthropic_response)
    add("/inference/v1/generate", generate_tokens)
    add("/v1/responses", responses)
    add("/v1/responses/input_tokens", response_input_tokens)
    add("/v1/responses/{response_id}", response_get, "GET")
    add("/v1/responses/{response_id}", response_delete, "DELETE")
    routes.add("POST", "/v1/responses/{response_id}/cancel", response_cancel)
    add("/v1/responses/{response_id}/input_items", response_input_items, "GET")
    return routes
