"""Lookup of the service of the model that a request names, held by a lease.

::

    route of the server --> body or query read, name found --> lease --> the model's own handler
                                                               `--> ends with the answer's last byte

Handlers of each model are made once, over a service of its own, when it is first in memory.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.models.model import Model, State, Ticket
from paceline.engine.models.pool import ModelPool
from paceline.errors import InvalidRequestError, PacelineError, QueueFullError
from paceline.http.errors import HttpError, public
from paceline.http.fields import show
from paceline.http.sse import unless_disconnected
from paceline.server.generation.service import LOAD_WAIT, Handler, Service, make_service
from paceline.server.models.begun import BegunStream
from paceline.server.settings.config import ServerConfig
from paceline.server.transport.middleware import (
    GENERATE_PATHS,
    keep_object,
    may_administer,
    read_object,
)

__all__ = ["Models", "seconds_of"]

# routes whose body names a model, in addition to those that generate
_BY_BODY: Final = GENERATE_PATHS | {
    "/invocations", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize",
    "/detokenize", "/apply-template", "/api/show",
}  # fmt: skip
# routes about one model, which the query may name
_BY_QUERY: Final = frozenset({"/props", "/slots", "/tokenizer_info", "/lora-adapters"})
# routes that another model may answer: ids and vectors are of one model
_FALLS_BACK: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat",
     "/api/generate", "/completion", "/completions"}
)  # fmt: skip
_SWITCH: Final = {"1": True, "true": True, "0": False, "false": False}
_TAG: Final = ":latest"
# the model that answered in place of the one that was named
_MODEL_HEADER: Final = "x-paceline-model"
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
# seconds above which a duration is for ever
_LONGEST: Final = 1e9
_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Models:
    """A ``ModelFinder``.

    Args:
        configs: the settings of each model's service, by name; read when it is first in memory.
        first: the model of requests that name none.
        routers: make the routes of a service.
        max_waits: seconds of loading above which a request gets 429 instead, by name of the model.
        autoload: requests load what they name, unless their query has ``autoload=false``.
        adapters: the model of each adapter, by name.
    """

    def __init__(
        self,
        pool: ModelPool,
        front: Service,
        configs: Mapping[str, Callable[[], ServerConfig]],
        first: str,
        routers: Sequence[Callable[[Service], object]],
        *,
        autoload: bool,
        max_waits: Mapping[str, float],
        adapters: Mapping[str, str],
    ) -> None:
        self.adapters = adapters
        self.pool, self.front, self.first = pool, front, first
        self._configs, self._routers, self._autoload = configs, routers, autoload
        self._max_waits = max_waits
        self.services: dict[str, Service] = {}
        self.on_made: Callable[[str, Service], None] | None = None
        self._making: dict[str, asyncio.Task[Service]] = {}

    def routed(self, method: str, path: str, handler: Handler) -> Handler:
        by_body = method == "POST" and path in _BY_BODY
        if not by_body and not (method == "GET" and path in _BY_QUERY):
            return handler

        async def answer(request: Request) -> Response:
            self.front.refuse_if_draining()
            body: dict[str, Any] = {}
            if by_body:
                body = await read_object(request, self.front.config)
                keep_object(request, body)
                name = body.get("model")
                if name is None and path == "/api/show":
                    name = body.get("name")
            else:
                await request.body()
                name = request.query_params.get("model")
            loads = _SWITCH.get(request.query_params.get("autoload", ""), self._autoload)
            known = self.known(name)
            # a model in place of an adapter's would answer without it
            may_fall_back = path in _FALLS_BACK and self._untagged(name) not in self.adapters
            answers = self._answering(known, loads=loads) if may_fall_back else known
            if answers != known:
                known = body["model"] = answers
            elif not loads:
                self._check_loaded(known)
            keep_alive = seconds_of(body.get("keep_alive")) if path.startswith("/api/") else None
            if not may_administer(request):
                # it unloads the model for all
                keep_alive = None
            if known != self.known(name):
                # meant for the model that was named, not for its fallback
                keep_alive = None
            self._check_wait(known)
            ticket = self.pool.ask(known)

            async def held() -> Response:
                waited = LOAD_WAIT.set(self.pool.now() - ticket.since)
                try:
                    service = await self._service(ticket.model.name)
                    return await service.handlers[method, path](request)
                finally:
                    # what still runs has a copy
                    LOAD_WAIT.reset(waited)

            try:
                if ticket.is_granted:
                    service = await self._service(ticket.model.name)
                    response = await service.handlers[method, path](request)
                else:
                    patience = self.front.config.sse_keep_alive if _streams(path, body) else 0.0
                    response = await self._once_granted(request, ticket, held, patience)
            except BaseException:
                self.pool.give(ticket, keep_alive)
                raise
            if known != self.known(name):
                response.headers[_MODEL_HEADER] = known
            return _Held(response, lambda: self.pool.give(ticket, keep_alive))

        return answer

    def _answering(self, name: str, *, loads: bool) -> str:
        """Return the model that answers for one: itself, or its fallback while that is in memory
        and it is not. Then it is loaded where there is room for it, for later requests."""
        states = self.pool.states
        model = states.find(name)
        if not model.spec.fallback or model.state is State.READY:
            return name
        other = states.find(model.spec.fallback)
        if other.state is not State.READY:
            return name
        if loads and model.state in (State.KNOWN, State.UNLOADED):
            with suppress(PacelineError):
                self.pool.prefetch(name)
        return other.name

    async def _once_granted(
        self,
        request: Request,
        ticket: Ticket,
        answer: Callable[[], Awaitable[Response]],
        patience: float,
    ) -> Response:
        """Return the answer, or after ``patience`` seconds (0: never) a stream that begins without
        the model."""
        granted = asyncio.ensure_future(self.pool.granted(ticket))
        try:
            # a caller who leaves waits no longer
            await unless_disconnected(
                request.receive, asyncio.wait((granted,), timeout=patience or None)
            )
        except BaseException:
            granted.cancel()
            raise
        if not granted.done():

            def progress() -> float:
                return self.pool.progress(ticket.model)

            return BegunStream(request, granted, answer, progress, patience)
        granted.result()
        return await answer()

    @asynccontextmanager
    async def serving(self, model: object) -> AsyncGenerator[Service, None]:
        name = self.known(model)
        async with self.pool.lease(name):
            yield await self._service(self.pool.states.find(name).name)

    def known(self, name: object) -> str:
        """Return the name of a model, as it may be leased; the first for none, and for what is no
        text, which its own handler refuses. Raises UnknownModelError."""
        asked = self._untagged(name)
        return self.pool.states.find(self.adapters.get(asked, asked)).name if asked else self.first

    def _untagged(self, name: object) -> str:
        """Return a name without Ollama's tag; empty for what is no text."""
        if not isinstance(name, str):
            return ""
        if name.endswith(_TAG) and name not in self.pool.states.models:
            return name.removesuffix(_TAG)
        return name

    async def make_all(self) -> None:
        """Make the services of all models that were in memory, to be described."""
        for name in tuple(self.pool.clients):
            await self._service(name)

    def shown_reason(self, model: Model) -> str:
        """Return why a model failed, without paths of this machine."""
        return public(model.reason)

    def _check_loaded(self, name: str) -> None:
        model = self.pool.states.find(name)
        if model.state is not State.READY:
            raise HttpError(
                400, f"the model {show(model.name)} is {model.state.value}, and autoload is off"
            )

    def _check_wait(self, name: str) -> None:
        """Raise QueueFullError where a model's load alone takes longer than a request may wait."""
        seconds, longest = self.pool.states.wait_for(name), self._max_waits.get(name, math.inf)
        # one that has failed rests: ``ask`` refuses, or has it tried again
        if seconds > longest and self.pool.states.find(name).state is not State.FAILED:
            # who comes back by then finds it in memory
            with suppress(PacelineError):
                self.pool.prefetch(name)
            raise QueueFullError(
                f"The model {name} is not in memory: its load takes {seconds:.1f} s, and at most "
                f"{longest:g} s to the first token are allowed",
                seconds,
                "predicted-ttft",
            )

    async def _service(self, name: str) -> Service:
        """Return the service of a model in memory."""
        if name not in self.services:
            if name not in self._making:
                making = self._making[name] = asyncio.create_task(self._make(name))
                making.add_done_callback(lambda _: self._making.pop(name, None))
            await asyncio.shield(self._making[name])
        return self.services[name]

    async def _make(self, name: str) -> Service:
        # it reads files
        config = await asyncio.to_thread(self._configs[name])
        service = make_service(self.pool.clients[name], config, self.front)
        if service.adapters is not None:
            await service.adapters.load_given()
        for router in self._routers:
            router(service)
        self.services[name] = service
        if self.on_made is not None:
            self.on_made(name, service)
        return service


def _streams(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a request is answered by server-sent events."""
    return body.get("stream") is True and not path.startswith("/api/")


class _Held(Response):
    """An answer that ends a lease once it is sent."""

    def __init__(self, answer: Response, done: Callable[[], None]) -> None:
        super().__init__()
        self._answer, self._done = answer, done
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._done()


def seconds_of(value: object) -> float | None:
    """Return a duration as Ollama takes it: a number of seconds, or a text such as "1h30m"; below 0
    for ever. None for none. Raises InvalidRequestError."""
    if value is None or value == "":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return math.inf if value < 0 or value > _LONGEST else float(value)
    if isinstance(value, str):
        text = value.strip()
        number = text.removeprefix("-")
        parts = [(number, "s")] if _NUMBER.fullmatch(number) else _DURATION.findall(number)
        if parts and number in (parts[0][0], "".join(each + unit for each, unit in parts)):
            seconds = sum(float(each) * _UNITS[unit] for each, unit in parts)
            return math.inf if number != text or seconds > _LONGEST else seconds
    raise InvalidRequestError(
        f"keep_alive must be seconds or a duration such as 5m, got {show(value)}", "keep_alive"
    )
