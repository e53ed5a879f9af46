"""The endpoints of Ollama's API; requests that change models are refused with an alternative."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

import paceline
from paceline.http.errors import HttpError, Reply, error_response
from paceline.server.apis.ollama.protocol import (
    LINES,
    OllamaRequest,
    ShowBody,
    parse_ollama_chat,
    parse_ollama_generate,
)
from paceline.server.apis.ollama.serving import (
    ollama_answer,
    ollama_lines,
    running_models,
    served_models,
    shown_model,
)
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import RequestRules
from paceline.server.transport.endpoint import JSON_BODY, body_of, respond, with_ignored
from paceline.server.transport.errors import ollama_error_body
from paceline.server.transport.middleware import read_object, tenant_of
from paceline.server.transport.responses import Handler, Routes, encoded

__all__ = ["REFUSED_ROUTES", "ollama_router"]

_MODELS: Final = (
    "models are not changed over HTTP: paceline pull, list and rm do it, and serve --model chooses"
)
REFUSED_ROUTES: Final = {
    ("POST", "/api/pull"): _MODELS,
    ("POST", "/api/push"): _MODELS,
    ("POST", "/api/create"): _MODELS,
    ("POST", "/api/copy"): _MODELS,
    ("DELETE", "/api/delete"): _MODELS,
}


def ollama_router(service: Service) -> Routes:
    routes = Routes(service, lambda reply, _: error_response(reply, ollama_error_body(reply)))
    add = routes.add

    def failed(reply: Reply) -> bytes:
        return ollama_error_body(reply) + b"\n"

    async def run(
        request: Request, parse: Callable[[dict[str, Any], RequestRules, str], OllamaRequest]
    ) -> Response:
        arrival = time.monotonic()
        parsed = parse(await body_of(service, request), service.rules, tenant_of(request, ""))
        return await respond(
            service, request, parsed, parsed, arrival, ollama_lines, ollama_answer, failed, LINES
        )

    async def ollama_chat(request: Request) -> Response:
        return await run(request, parse_ollama_chat)

    async def ollama_generate(request: Request) -> Response:
        return await run(request, parse_ollama_generate)

    async def ollama_show(request: Request) -> Response:
        asked = ShowBody.read(await read_object(request, service.config), service.rules)
        return with_ignored(encoded(shown_model(service, asked)), asked)

    async def ollama_tags(_request: Request) -> Response:
        return encoded(served_models(service))

    async def ollama_ps(_request: Request) -> Response:
        return encoded(running_models(service))

    async def ollama_version(_request: Request) -> Response:
        return encoded({"version": paceline.__version__})

    add("POST", "/api/chat", ollama_chat, JSON_BODY)
    add("POST", "/api/generate", ollama_generate, JSON_BODY)
    add("POST", "/api/show", ollama_show, JSON_BODY)
    add("GET", "/api/tags", ollama_tags)
    add("GET", "/api/ps", ollama_ps)
    add("GET", "/api/version", ollama_version)
    for (method, path), why in REFUSED_ROUTES.items():
        add(method, path, _refusing(why), name=path, include_in_schema=False)
    return routes


def _refusing(why: str) -> Handler:
    async def refuse(_request: Request) -> Response:
        raise HttpError(404, why)

    return refuse
