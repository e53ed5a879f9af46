"""Endpoints about several models: lists with their states, and what loads and unloads them.

llama-server's ``/models``, Ollama's ``/api/tags``, ``/api/ps`` and ``/api/pull``, and
``/v1/models`` with a status. They stand before the routes of one model, whose paths they share.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from paceline.engine.models.model import Model, State
from paceline.http.errors import HttpError, error_response
from paceline.http.fields import show
from paceline.http.sse import STREAM_HEADERS, event, unless_disconnected
from paceline.server.apis.info import model_card
from paceline.server.apis.ollama.serving import rfc3339
from paceline.server.generation.service import Service
from paceline.server.models.finding import Models
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import boolean, ignored, needed, string
from paceline.server.protocol.responses import encode
from paceline.server.transport.endpoint import JSON_BODY, with_ignored
from paceline.server.transport.errors import llama_error_body, ollama_error_body
from paceline.server.transport.middleware import may_administer, read_object
from paceline.server.transport.responses import Handler, Routes, encoded

__all__ = ["ModelBody", "PinBody", "PullBody", "model_routers"]

# llama-server's words
_LLAMA: Final = {State.READY: "loaded", State.DRAINING: "loaded", State.LOADING: "loading"}
# seconds without a change after which a comment shows that a follower's connection lives
_KEEP_ALIVE: Final = 15.0
# time of a model that stays until its memory is needed, as Ollama shows it
_FOREVER: Final = 100 * 365 * 86400.0


class ModelBody(Body):
    """``POST /models/load`` and ``/models/unload``."""

    model = needed(string())
    extra_args = ignored(note="--model NAME=PATH,FLAG=VALUE gives a model flags")


class PinBody(Body):
    """``POST /models/pin``."""

    model = needed(string())
    pinned = boolean(True)


class PullBody(Body):
    """``POST /api/pull``."""

    model = string()
    name = string(note="older clients' field for `model`")
    stream = boolean(True)
    insecure = ignored()


def model_routers(models: Models) -> tuple[Routes, ...]:
    """Return the routes, in the formats of errors of the APIs that they belong to."""
    return _open_ai(models), _llama(models), _ollama(models)


def _open_ai(models: Models) -> Routes:
    routes = Routes(models.front)

    async def listed(_request: Request) -> Response:
        await models.make_all()
        cards = [_card(models, model) for model in models.pool.states.models.values()]
        cards += [_adapter_card(models, name) for name in models.adapters]
        return encoded({"object": "list", "data": cards})

    async def one(request: Request) -> Response:
        await models.make_all()
        name = request.path_params["name"]
        if name in models.adapters:
            return encoded(_adapter_card(models, name))
        return encoded(_card(models, models.pool.states.find(models.known(name))))

    _add(routes, "GET", "/v1/models", listed)
    _add(routes, "GET", "/v1/models/{name:path}", one)
    return routes


def _llama(models: Models) -> Routes:
    front, pool = models.front, models.pool
    routes = Routes(front, lambda reply, _: error_response(reply, llama_error_body(reply)))

    async def listed(_request: Request) -> Response:
        await models.make_all()
        found = [_llama_card(models, model) for model in pool.states.models.values()]
        return encoded({"object": "list", "data": found})

    async def load(request: Request) -> Response:
        body = await _asked(front, request)
        await unless_disconnected(request.receive, pool.load(models.known(body.model)))
        return with_ignored(encoded({"success": True}), body)

    async def unload(request: Request) -> Response:
        body = await _asked(front, request)
        pool.unload(models.known(body.model))
        return with_ignored(encoded({"success": True}), body)

    async def pin(request: Request) -> Response:
        _check_may_change(request)
        body = PinBody.read(await read_object(request, front.config), front.rules)
        pool.pin(models.known(body.model), pinned=bool(body.pinned))
        return with_ignored(encoded({"success": True}), body)

    async def follow(_request: Request) -> Response:
        return StreamingResponse(
            _changes(models), media_type="text/event-stream", headers=STREAM_HEADERS
        )

    _add(routes, "GET", "/models", listed)
    _add(routes, "POST", "/models/load", load)
    _add(routes, "POST", "/models/unload", unload)
    _add(routes, "POST", "/models/pin", pin)
    _add(routes, "GET", "/models/sse", follow)
    return routes


def _ollama(models: Models) -> Routes:
    front, pool = models.front, models.pool
    routes = Routes(front, lambda reply, _: error_response(reply, ollama_error_body(reply)))

    async def tags(_request: Request) -> Response:
        await models.make_all()
        return encoded({"models": [_ollama_card(models, m) for m in pool.states.models.values()]})

    async def running(_request: Request) -> Response:
        await models.make_all()
        resident = [m for m in pool.states.models.values() if m.is_resident]
        return encoded({"models": [_running_card(models, model) for model in resident]})

    async def pull(request: Request) -> Response:
        body = PullBody.read(await read_object(request, front.config), front.rules)
        name = body.model or body.name or ""
        if not _has(models, name):
            raise HttpError(
                404, f"{show(name)} is not here: paceline pull fetches it, and --model serves it"
            )
        answer = encode({"status": "success"})
        media_type = "application/x-ndjson" if body.stream else "application/json"
        return with_ignored(Response(answer + b"\n", media_type=media_type), body)

    _add(routes, "GET", "/api/tags", tags)
    _add(routes, "GET", "/api/ps", running)
    _add(routes, "POST", "/api/pull", pull)
    return routes


def _add(routes: Routes, method: str, path: str, handler: Handler) -> None:
    routes.add(method, path, handler, JSON_BODY if method == "POST" else None, name=f"models{path}")


def _has(models: Models, name: str) -> bool:
    states = models.pool.states
    return bool(name) and name.removesuffix(":latest") in {
        each for model in states.models.values() for each in (model.name, *model.spec.aliases)
    }


async def _asked(front: Service, request: Request) -> ModelBody:
    _check_may_change(request)
    return ModelBody.read(await read_object(request, front.config), front.rules)


def _check_may_change(request: Request) -> None:
    """Raise HttpError 403 for a caller who may not load and unload models."""
    if not may_administer(request):
        raise HttpError(403, f"{request.scope['path']} requires a key of scope admin")


def _card(models: Models, model: Model) -> dict[str, Any]:
    """Return a model as ``/v1/models`` shows it: with all that is known once it was in memory."""
    service = models.services.get(model.name)
    card: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": models.front.created,
        "owned_by": "paceline",
        "parent": None,
    }
    if service is not None:
        card = model_card(service, model.name)
    return card | {"aliases": list(model.spec.aliases), "status": _status(models, model)}


def _adapter_card(models: Models, name: str) -> dict[str, Any]:
    parent = models.adapters[name]
    service = models.services.get(parent)
    if service is not None and name in service.rules.adapters:
        return model_card(service, name)
    created = models.front.created
    return {
        "id": name, "object": "model", "created": created, "owned_by": "paceline",
        "parent": parent, "status": "registered",
    }  # fmt: skip


def _status(models: Models, model: Model) -> dict[str, Any]:
    now = models.pool.now()
    status: dict[str, Any] = {"value": model.state.value}
    if model.state is State.LOADING:
        status["progress"] = round(models.pool.progress(model), 2)
    if model.state is State.FAILED:
        status["reason"] = models.shown_reason(model)
        if model.retry_at < math.inf:
            status["retry_after"] = max(0.0, round(model.retry_at - now, 1))
    return status | {
        "pinned": model.spec.pinned,
        "requests": len(model.leases),
        "waiting": len(model.waiting),
        "bytes": dict(model.account.by_kind()),
        "memory": models.pool.states.ledger.memory,
        "load_seconds": round(models.pool.states.loads.predict(model.name, model.account.total), 3),
    }


def _llama_card(models: Models, model: Model) -> dict[str, Any]:
    status: dict[str, Any] = {"value": _LLAMA.get(model.state, "unloaded"), "args": []}
    if model.state is State.FAILED:
        status |= {"failed": True, "exit_code": 1, "reason": models.shown_reason(model)}
    return _card(models, model) | {"in_cache": True, "status": status}


def _ollama_card(models: Models, model: Model) -> dict[str, Any]:
    service = models.services.get(model.name)
    level = "" if service is None else service.client.info.dtype
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": rfc3339(models.front.created),
        "size": model.account.weights,
        "details": {"quantization_level": level},
    }


def _running_card(models: Models, model: Model) -> dict[str, Any]:
    kept = models.pool.states.kept(model)
    if model.spec.pinned or kept > _FOREVER:
        kept = _FOREVER
    # a model in use stays for as long after that
    left = kept if model.leases else model.last_used + kept - models.pool.now()
    service = models.services.get(model.name)
    return _ollama_card(models, model) | {
        "size": model.account.total,
        "size_vram": 0,
        "expires_at": rfc3339(time.time() + max(0.0, left)),
        "context_length": 0 if service is None else service.rules.max_model_len,
    }


async def _changes(models: Models) -> AsyncGenerator[bytes, None]:
    """Yield the state of each model, and then of each that changes."""
    shown: dict[str, str] = {}
    while not models.front.is_ending:
        told = False
        for model in models.pool.states.models.values():
            if shown.get(model.name) != model.state.value:
                told, shown[model.name] = True, model.state.value
                data = {"status": _LLAMA.get(model.state, "unloaded"), "state": model.state.value}
                yield event(encode({"model": model.name, "event": "model_status", "data": data}))
        if told:
            # another may have changed while the reader took these
            continue
        try:
            async with asyncio.timeout(_KEEP_ALIVE):
                await models.pool.changed()
        except TimeoutError:
            yield b": \n\n"
