"""The endpoints that only llama-server has; those that change how it was started are refused."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.http.errors import HttpError, Reply, error_response
from paceline.http.sse import event
from paceline.server.apis.llama_cpp.info import (
    fim_tokens,
    infill_prompt,
    properties,
    slots,
    template_applied,
)
from paceline.server.apis.llama_cpp.protocol import (
    LlamaRequest,
    adapter_scales,
    parse_llama_completion,
)
from paceline.server.apis.llama_cpp.serving import llama_answer, llama_events
from paceline.server.generation.adapters import check_places
from paceline.server.generation.service import Service
from paceline.server.protocol.generation import TemplateBody
from paceline.server.transport.endpoint import JSON_BODY, body_of, caller_of, respond, with_ignored
from paceline.server.transport.errors import llama_error_body
from paceline.server.transport.middleware import read_json, read_object
from paceline.server.transport.responses import Routes, encoded

__all__ = ["llama_router"]


def llama_router(service: Service) -> Routes:
    routes = Routes(service, lambda reply, _: error_response(reply, llama_error_body(reply)))
    add = routes.add

    @cache
    def fim() -> Any:
        return fim_tokens(service.client.tokenizer)

    def failed(reply: Reply) -> bytes:
        return event(llama_error_body(reply))

    def parsed(request: Request, body: dict[str, Any]) -> LlamaRequest:
        return parse_llama_completion(body, service.rules, caller_of(request, body))

    async def run(request: Request, asked: LlamaRequest, arrival: float) -> Response:
        return await respond(
            service, request, asked, asked.options, arrival, llama_events, llama_answer, failed
        )

    async def completion(request: Request) -> Response:
        arrival = time.monotonic()
        return await run(request, parsed(request, await body_of(service, request)), arrival)

    async def infill(request: Request) -> Response:
        arrival = time.monotonic()
        found = fim()
        given = await body_of(service, request)
        body = infill_prompt(given, service.rules, found, service.model_name)
        asked = parsed(request, body)
        options = asked.options
        ends = options.sampling.stop_token_ids
        if not body.get("ignore_eos"):
            ends |= found.ends
        sampling = replace(options.sampling, stop_token_ids=ends)
        options = replace(options, sampling=sampling)
        return await run(request, replace(asked, options=options), arrival)

    async def apply_template(request: Request) -> Response:
        body = await read_object(request, service.config)
        asked = TemplateBody.read(body, service.rules)
        return with_ignored(encoded(await template_applied(service, asked)), asked)

    async def props(_request: Request) -> Response:
        return encoded(properties(service))

    async def all_slots(request: Request) -> Response:
        states = slots(service)
        asks = request.query_params.get("fail_on_no_slot") == "1"
        if asks and all(slot["is_processing"] for slot in states):
            raise HttpError(503, "no slot is free")
        return encoded(states)

    async def lora_adapters(_request: Request) -> Response:
        found = service.rules.adapters.values()
        return encoded(
            [
                {"id": place, "path": adapter.root, "scale": adapter.applied}
                for place, adapter in enumerate(found)
            ]
        )

    async def apply_adapters(request: Request) -> Response:
        if len(service.keys) and not request.scope["state"]["speaks_for_others"]:
            raise HttpError(403, "POST /lora-adapters requires a key of scope admin")
        scales = adapter_scales(await read_json(request, service.config))
        if service.adapters is not None:
            service.adapters.apply(scales)
        else:
            check_places(scales, 0)
        return encoded({"success": True})

    add("POST", "/completion", completion, JSON_BODY)
    add("POST", "/completions", completion, JSON_BODY, name="completions_native")
    add("POST", "/infill", infill, JSON_BODY)
    add("POST", "/apply-template", apply_template, JSON_BODY)
    add("GET", "/props", props)
    add("GET", "/slots", all_slots)
    add("GET", "/lora-adapters", lora_adapters)
    add("POST", "/lora-adapters", apply_adapters, JSON_BODY)
    return routes
