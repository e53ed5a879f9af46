"""The endpoints of Responses, Anthropic's Messages, and token ids in and out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.types import GenerationOutput
from paceline.http.errors import Reply, error_response
from paceline.http.shortcut import Shortcut
from paceline.server.apis.anthropic import (
    CountTokensBody,
    count_tokens,
    messages_answer,
    messages_events,
    parse_messages_api,
)
from paceline.server.apis.responses.items import input_items
from paceline.server.apis.responses.protocol import ResponsesRequest, parse_responses, previous_id
from paceline.server.apis.responses.serving import (
    cancel_response,
    failed_event,
    response_answer,
    response_events,
)
from paceline.server.apis.token_ids import parse_token_generate, token_answer, token_events
from paceline.server.generation.service import Service
from paceline.server.protocol.targets import CALLER_FIELDS, named_tenant, with_headers
from paceline.server.transport.endpoint import JSON_BODY, Events, generate, respond, with_ignored
from paceline.server.transport.errors import anthropic_error_body
from paceline.server.transport.middleware import principal_of, read_object, request_id_of, tenant_of
from paceline.server.transport.responses import Handler, Routes, encoded, json_response

__all__ = ["other_apis_router"]

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

    async def body_of(request: Request) -> dict[str, Any]:
        service.refuse_if_draining()
        body = await read_object(request, service.config)
        return with_headers(body, request.headers)

    async def messages(request: Request) -> Response:
        arrival = time.monotonic()
        body = await body_of(request)
        named = named_tenant(body.get("metadata"), "user_id")
        parsed = parse_messages_api(body, service.rules, tenant_of(request, named))
        request_id = request_id_of(request)

        def failed(reply: Reply) -> bytes:
            return b"event: error\ndata: %b\n\n" % anthropic_error_body(reply, request_id)

        events = _usual(messages_events)
        response = await respond(
            service, request, parsed, parsed.options, arrival, events, messages_answer, failed
        )
        return with_ignored(response, parsed.options)

    async def messages_count_tokens(request: Request) -> Response:
        asked = CountTokensBody.read(await body_of(request), service.rules)
        return with_ignored(json_response(await count_tokens(service, asked)), asked)

    def responses_request(request: Request, body: dict[str, Any]) -> ResponsesRequest:
        owner = principal_of(request)
        previous = previous_id(body)
        before = [] if previous is None else service.responses.conversation(previous, owner)
        tenant = tenant_of(request, named_tenant(body, *CALLER_FIELDS))
        return parse_responses(body, service.rules, tenant, before=before, owner=owner)

    async def responses(request: Request) -> Response:
        arrival = time.monotonic()
        parsed = responses_request(request, await body_of(request))
        options = parsed.chat.options
        events = _usual(response_events)
        answer = await respond(
            service, request, parsed, options, arrival, events, response_answer, failed_event
        )
        return with_ignored(answer, options)

    async def response_get(request: Request) -> Response:
        found = service.responses.get(request.path_params["response_id"], principal_of(request))
        return encoded(found.body)

    async def response_input_items(request: Request) -> Response:
        found = service.responses.get(request.path_params["response_id"], principal_of(request))
        return json_response(input_items(found, request.query_params))

    async def response_input_tokens(request: Request) -> Response:
        parsed = responses_request(request, await body_of(request))
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
