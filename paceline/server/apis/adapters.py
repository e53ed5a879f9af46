"""vLLM's endpoints that load and unload adapters, and llama-server's list of them."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.http.errors import HttpError
from paceline.server.generation.adapters import AdapterNames
from paceline.server.generation.service import Service
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import boolean, ignored, needed, string
from paceline.server.transport.endpoint import JSON_BODY, with_ignored
from paceline.server.transport.middleware import read_object
from paceline.server.transport.responses import Routes

__all__ = ["LoadAdapterBody", "UnloadAdapterBody", "adapter_router"]

LOAD_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"


class LoadAdapterBody(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name = needed(string())
    lora_path = needed(string(note="a folder or file below one of --lora-root"))
    load_inplace = boolean(note="replaces an adapter that is loaded under this name")
    pinned = boolean(note="keeps it in memory until it is unloaded, as SGLang's field")
    base_model_name = ignored(note="shapes decide which model an adapter fits")
    is_3d_lora_weight = ignored(note="experts have no adapters")


class UnloadAdapterBody(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name = needed(string())
    lora_int_id = ignored(note="names alone tell adapters apart")


def adapter_router(service: Service) -> Routes:
    routes = Routes(service)

    async def load(request: Request) -> Response:
        names = _changeable(service)
        body = LoadAdapterBody.read(await read_object(request, service.config), service.rules)
        name = body.lora_name
        await names.load(
            name, body.lora_path, in_place=bool(body.load_inplace), pinned=bool(body.pinned)
        )
        return with_ignored(_said(f"LoRA adapter '{name}' added"), body)

    async def unload(request: Request) -> Response:
        names = _changeable(service)
        body = UnloadAdapterBody.read(await read_object(request, service.config), service.rules)
        names.unload(body.lora_name)
        return with_ignored(_said(f"LoRA adapter '{body.lora_name}' removed"), body)

    routes.add("POST", LOAD_PATH, load, JSON_BODY)
    routes.add("POST", UNLOAD_PATH, unload, JSON_BODY)
    return routes


def _changeable(service: Service) -> AdapterNames:
    """Return the names, where requests may change them. Raises HttpError 403."""
    if service.adapters is None or not service.config.adapters.allow_runtime:
        raise HttpError(
            403, "Adapters are loaded by requests only with --enable-lora and --allow-runtime-lora"
        )
    return service.adapters


def _said(what: str) -> Response:
    return Response(f"Success: {what} successfully.", media_type="text/plain")
