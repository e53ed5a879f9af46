"""How every endpoint that generates is answered: whole, or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.types import GenerationOutput
from paceline.http.errors import HttpError, Reply, error_body, reply_to
from paceline.http.shortcut import Shortcut
from paceline.http.sse import DONE, SSE, EventStream, event, first_event, unless_disconnected
from paceline.server.generation.service import LOAD_WAIT, Service
from paceline.server.protocol.requests import GenerationOptions, RequestRules
from paceline.server.protocol.rules import NamedAdapter
from paceline.server.protocol.targets import CALLER_FIELDS, named_tenant, with_headers
from paceline.server.transport.middleware import (
    may_administer,
    read_object,
    request_id_of,
    tenant_of,
)
from paceline.server.transport.responses import json_response

__all__ = [
    "ADAPTER_HEADER",
    "IGNORED_HEADER",
    "JSON_BODY",
    "Answered",
    "Events",
    "HasIgnored",
    "body_of",
    "caller_of",
    "generate",
    "respond",
    "with_ignored",
]

# names the fields that were not read
IGNORED_HEADER: Final = "x-paceline-ignored-fields"
# says whether the request's adapter was in memory, or was loaded for it
ADAPTER_HEADER: Final = "x-paceline-adapter"
# bodies are parsed by hand (protocol/requests.py), so the schema for /docs only names their type
JSON_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


class Answered(Protocol):
    """Options that decide how an answer is sent."""

    @property
    def stream(self) -> bool: ...

    @property
    def request_id(self) -> str | None:
        """The caller's own id, if any."""

    @property
    def ignored_fields(self) -> tuple[str, ...]: ...

    @property
    def adapter(self) -> NamedAdapter | None:
        """The adapter of the request, if any."""


class _Parsed(Protocol):
    @property
    def options(self) -> GenerationOptions: ...


_R = TypeVar("_R", bound=_Parsed)
_P = TypeVar("_P")
# makes a streamed answer from the service, a parsed request, its id, its arrival time, and a
# shortcut that may take some of the events after the first
Events: TypeAlias = Callable[
    [Service, _P, str, float, Shortcut[GenerationOutput]], AsyncGenerator[bytes, None]
]


async def body_of(service: Service, request: Request) -> dict[str, Any]:
    """Read a body and the targets in its headers. Raises EngineDrainingError if the server ends."""
    service.refuse_if_draining()
    body = with_headers(await read_object(request, service.config), request.headers)
    if service.adapters is not None:
        await service.adapters.resolve(body.get("model"))
    return body


def caller_of(request: Request, body: dict[str, Any]) -> str:
    """Return the tenant: the key's, or the one that the body names. Raises HttpError where a body
    has the server connect somewhere without the right to."""
    if body.get("kv_source") is not None and not may_administer(request):
        raise HttpError(403, "kv_source requires a key of scope admin")
    return tenant_of(request, named_tenant(body, *CALLER_FIELDS))


async def generate(
    service: Service,
    request: Request,
    parse: Callable[[dict[str, Any], RequestRules, str], _R],
    events: Events[_R],
    answer: Callable[[Service, _R, str, float], Awaitable[bytes]],
    failed: Callable[[Reply], bytes] = lambda reply: event(error_body(reply)) + DONE,
    body: dict[str, Any] | None = None,
) -> Response:
    """Read (unless ``body`` is given), check, run and answer a request; see ``respond``."""
    arrival = time.monotonic()
    if body is None:
        body = await body_of(service, request)
    parsed = parse(body, service.rules, caller_of(request, body))
    return await respond(service, request, parsed, parsed.options, arrival, events, answer, failed)


class HasIgnored(Protocol):
    """Options that list the fields that were not read."""

    @property
    def ignored_fields(self) -> tuple[str, ...]: ...


def with_ignored(response: Response, options: HasIgnored) -> Response:
    """Add a header to the answer that names the fields that were not read, if any."""
    if options.ignored_fields:
        response.headers[IGNORED_HEADER] = _header_value(options.ignored_fields)
    return response


def _header_value(names: Sequence[str]) -> str:
    """Return names as callers chose them, quoted as in an error message, as a header value."""
    plain = ", ".join(name.strip("'") for name in names)
    return plain.encode("ascii", "backslashreplace").decode()


async def respond(
    service: Service,
    request: Request,
    parsed: _P,
    options: Answered,
    arrival: float,
    events: Events[_P],
    answer: Callable[[Service, _P, str, float], Awaitable[bytes]],
    failed: Callable[[Reply], bytes],
    media_type: str = SSE,
) -> Response:
    """Run a parsed request and answer it, whole or as a stream, with a header that names the fields
    that were not read, and one that says how its adapter was found.

    Args:
        failed: makes the last bytes of a stream that breaks.
        media_type: that of a stream.
    """
    service.check_generates()
    arrival -= LOAD_WAIT.get()
    request_id = options.request_id or request_id_of(request)
    headers = _adapter_header(service, options)
    if not options.stream:
        whole = answer(service, parsed, request_id, arrival)
        response = json_response(await unless_disconnected(request.receive, whole))
        response.headers.update(headers)
        return with_ignored(response, options)
    # streams of other types have no comments
    keep_alive = service.config.sse_keep_alive if media_type == SSE else 0.0
    shortcut: Shortcut[GenerationOutput] = Shortcut()
    source = events(service, parsed, request_id, arrival, shortcut)
    first, rest = await first_event(source, request.receive, keep_alive)

    def describe(error: Exception) -> bytes:
        return failed(reply_to(error, drain_timeout=service.config.drain_timeout))

    stream = EventStream(
        first, rest, describe, keep_alive, shortcut=shortcut, media_type=media_type
    )
    stream.headers.update(headers)
    return with_ignored(stream, options)


def _adapter_header(service: Service, options: Answered) -> dict[str, str]:
    """Return the header of a request with an adapter, from what is in memory before it runs."""
    if options.adapter is None or service.adapters is None:
        return {}
    return {ADAPTER_HEADER: service.adapters.state_of(options.adapter)}
