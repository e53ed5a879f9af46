"""State that all handlers of one app share, and the way a request runs on the engine."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, Final, Protocol, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import paceline
from paceline.core.pooling import EMBED
from paceline.engine.protocol import AdapterClient, EngineClient, Tokenizer
from paceline.engine.types import EngineStats, GenerationOutput, GenerationRequest
from paceline.errors import EngineDeadError, EngineDrainingError, EngineError, InvalidRequestError
from paceline.http.keys import KeyRing
from paceline.http.rate_limits.limiter import RateLimiter, Tally, current_ticket
from paceline.http.rate_limits.store import RateStore
from paceline.http.shortcut import Shortcut
from paceline.http.slow_readers import SlowReaders
from paceline.server.generation.adapters import AdapterNames
from paceline.server.generation.prompts import PromptMaker
from paceline.server.generation.response_store import ResponseStore
from paceline.server.generation.run import RunObserver, merged, run_one
from paceline.server.model_formats.reasoning import REASONING_FORMATS, Thinking, detect_reasoning
from paceline.server.model_formats.tool_formats import TOOL_FORMATS, detect_format
from paceline.server.observability.metrics.engine import FaultCollector
from paceline.server.observability.metrics.requests import RequestObserver, TenantObserver
from paceline.server.observability.metrics.server import ServerMetrics
from paceline.server.observability.tracing import Tracing
from paceline.server.protocol.earlier_calls import wants_short_ids
from paceline.server.protocol.requests import RequestRules
from paceline.server.protocol.rules import NamedAdapter
from paceline.server.protocol.targets import CLASSES
from paceline.server.settings.config import ServerConfig

__all__ = ["LOAD_WAIT", "Entry", "Handler", "ModelFinder", "Service", "UnderWay", "make_service"]

# the seconds that a request has waited for its model, where one server has several: everything that
# answers a request runs in its context, and a server of one model never sets it
LOAD_WAIT: Final = ContextVar("LOAD_WAIT", default=0.0)


_log = logging.getLogger("paceline.server")
# --no-enable-log-requests silences it
_requests_log = logging.getLogger("paceline.server.requests")

DRAINING: Final = "the server is shutting down and takes no new requests"


@dataclass(frozen=True, slots=True)
class Entry:
    """One request between its start and its end, waiting or running."""

    # slot number: the smallest that was free when the request began, from 0
    place: int
    # number in order of arrival, from 0
    number: int
    request: GenerationRequest
    # counts its tokens so far
    counted: RequestObserver


class UnderWay:
    """Requests by slot. Used from the event loop's thread."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        # free slots below the largest number of entries there ever were at once
        self._free: list[int] = []
        self._begun = 0

    def enter(self, request: GenerationRequest, counted: RequestObserver) -> int:
        """Add a request; return its slot, for ``leave``."""
        place = heapq.heappop(self._free) if self._free else len(self._entries)
        self._entries[place] = Entry(place, self._begun, request, counted)
        self._begun += 1
        return place

    def leave(self, place: int) -> None:
        del self._entries[place]
        heapq.heappush(self._free, place)

    def entries(self) -> list[Entry]:
        """Return the entries, in slot order."""
        return [entry for _, entry in sorted(self._entries.items())]


# an answer to an exchange, errors included
Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


class ModelFinder(Protocol):
    """The models of a server that has several."""

    # the model of requests that name none
    first: str
    # called with the name and service of each model that is first in memory
    on_made: Callable[[str, Service], None] | None

    def known(self, name: object) -> str:
        """Return the model that a name stands for; the first for none. Raises
        UnknownModelError."""

    def routed(self, method: str, path: str, handler: Handler) -> Handler:
        """Return what answers a route: the handler of the model that a request names, or
        ``handler`` where none is named by requests of this route."""

    def serving(self, model: object) -> AbstractAsyncContextManager[Service]:
        """Hold the service of a model, which is loaded if it must be. ``model`` is what a body has
        as its name."""


@dataclass(kw_only=True, eq=False)
class Service:
    """One app's engine and everything around it. Used from the event loop's thread."""

    client: EngineClient
    config: ServerConfig
    rules: RequestRules
    prompts: PromptMaker
    metrics: ServerMetrics
    # unix time, for /v1/models
    created: int
    keys: KeyRing
    slow_readers: SlowReaders
    # None: traces are off
    tracing: Tracing | None = None
    # None: there are no limits
    limiter: RateLimiter | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)
    under_way: UnderWay = field(default_factory=UnderWay)
    # None: the engine has no adapters
    adapters: AdapterNames | None = None
    # finds the service of the model that a request names; None: there is one model
    models: ModelFinder | None = None
    # answers by method and path of the route
    handlers: dict[tuple[str, str], Handler] = field(default_factory=dict)
    # of the server of several models, of which this is one; None: this is the server's
    front: Service | None = None
    # the server takes no new generation requests any more
    draining: bool = False
    # why the engine is gone; None while it is there
    dead: str | None = None
    # generation requests between arrival and last byte
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    # functions that stop background tasks for viewers; called once the server drains
    side_work: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    @property
    def model_name(self) -> str:
        return self.rules.served_model_names[0]

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes with the model, its number formats, and the software."""
        info = self.client.info
        parts = (paceline.__version__, info.model, info.backend, info.dtype, info.kv_dtype)
        return f"fp_{sha256(repr(parts).encode()).hexdigest()[:10]}"

    @cached_property
    def model_digest(self) -> str:
        """A hash that changes with the model, its number formats, and its chat template: what an
        answer's log-probabilities depend on. It outlasts an upgrade, other than ``fingerprint``."""
        info = self.client.info
        template = self.client.tokenizer.chat_template_source
        parts = (info.model, info.backend, info.dtype, info.kv_dtype, template)
        return sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def is_ending(self) -> bool:
        """Whether an answer that begins now is the last one on its connection."""
        return self.draining or self.dead is not None or bool(self.front and self.front.is_ending)

    def refuse_if_draining(self) -> None:
        """Raise EngineDeadError or EngineDrainingError if the server ends for that reason."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.draining:
            raise EngineDrainingError(DRAINING)

    def check_health(self) -> None:
        """Return if the engine can generate; raise EngineDrainingError, EngineLostError or
        EngineDeadError otherwise."""
        self.refuse_if_draining()
        self.client.check_health()

    def serving(self, model: object) -> AbstractAsyncContextManager[Service]:
        """Hold the service of the model that a body names."""
        return nullcontext(self) if self.models is None else self.models.serving(model)

    async def end_side_work(self) -> None:
        """Stop background tasks that serve viewers. They hold no state, so nothing is lost."""
        while self.side_work:
            await self.side_work.pop()()

    @property
    def is_ready(self) -> bool:
        """Whether ``check_health`` returns."""
        try:
            self.check_health()
        except EngineError:
            return False
        return True

    def check_alive(self) -> None:
        """Return unless the engine is gone for good; raise EngineDeadError then."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    def check_generates(self) -> None:
        """Raise InvalidRequestError if the model is a pooling model, which generates no tokens."""
        pooling = self.client.info.pooling
        if pooling is None:
            return
        served = "classifies: ask /classify, /score or /rerank"
        if pooling.task == EMBED:
            served = "gives embeddings: ask /v1/embeddings, /score or /rerank"
        raise InvalidRequestError(
            f"The model {self.model_name} does not generate text, it {served}. A model that can do "
            "both generates with --runner generate.",
            "model",
        )

    def enter(self) -> None:
        if self.front is not None:
            self.front.enter()
        self.in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        if self.front is not None:
            self.front.leave()
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    def run(
        self,
        requests: Sequence[GenerationRequest],
        shortcut: Shortcut[GenerationOutput] | None = None,
    ) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
        """Yield deltas of all requests as they arrive, each with its request's index in
        ``requests``. For a single request ``shortcut`` may take some.

        Closing the generator aborts the running requests. With API keys, requests find cached
        prefixes of their own tenant only.

        Raises:
            HttpError: 429, the caller's limit is reached.
            RequestError: the engine refused one of them.
            RequestFailedError: one failed inside the engine.
            EngineDrainingError: the server shut down before they were done.
            EngineLostError: the engine is being replaced, and a request cannot go on there.
            EngineDeadError: the engine is gone.
        """
        if any(request.sampling.pooling is None for request in requests):
            self.check_generates()
        if len(self.keys) and not self.config.share_prefix_cache:
            requests = [_salted(request) for request in requests]
        tally = Tally.of(len(requests))
        alone = len(requests) == 1
        outputs = merged(
            [
                run_one(
                    self.client,
                    request,
                    partial(self._observers, request, tally, index),
                    shortcut if alone else None,
                )
                for index, request in enumerate(requests)
            ]
        )
        ticket = current_ticket()
        if ticket is None or self.limiter is None:
            return outputs
        return self.limiter.metered(
            ticket,
            [len(request.prompt_token_ids) for request in requests],
            sum(
                0 if request.sampling.pooling else request.n * request.sampling.max_tokens
                for request in requests
            ),
            outputs,
            tally,
        )

    def _observers(
        self, request: GenerationRequest, tally: Tally, index: int
    ) -> Sequence[RunObserver]:
        """Return the observers of one request, which ``tally`` knows by ``index``."""
        counted = RequestObserver(self.metrics.requests, request)
        observers: list[RunObserver] = [counted]
        if self.metrics.tenants is not None:
            observers.append(TenantObserver(self.metrics.tenants, request.tenant, counted))
        if self.limiter is not None:
            observers.append(_Tallied(tally, index))
        if self.tracing is not None:
            observers.append(self.tracing.follow(request))
        return (*observers, _Logged(request, counted, self.under_way))


class _Tallied:
    """Reports generated tokens to the rate limit."""

    def __init__(self, tally: Tally, index: int) -> None:
        self._tally = tally
        self._index = index

    def output(self, output: GenerationOutput, now: float) -> None:
        self._tally.note(self._index, output.num_output_tokens)

    def end(self, error: Exception | None, now: float) -> None:
        """Do nothing: the limiter ends with the exchange."""


class _Logged:
    """Lists a request as in flight, and writes one log line at its end."""

    def __init__(
        self, request: GenerationRequest, counted: RequestObserver, under_way: UnderWay
    ) -> None:
        self._request = request
        self._counted = counted
        self._under_way = under_way
        self._place = under_way.enter(request, counted)

    def output(self, output: GenerationOutput, now: float) -> None:
        """Do nothing: another observer counts the tokens."""

    def end(self, error: Exception | None, now: float) -> None:
        self._under_way.leave(self._place)
        request, counted = self._request, self._counted
        end = "done" if counted.is_finished else "abort"
        _requests_log.info(
            "request id=%s prompt_tokens=%d output_tokens=%d n=%d seconds=%.3f end=%s "
            "queued=%s waited_for=%s chunks=%s preemptions=%d recomputed_tokens=%s "
            "predicted_ttft=%s ttft=%s tokens_per_second=%s",
            request.request_id,
            len(request.prompt_token_ids),
            counted.num_output_tokens,
            request.n,
            now - request.arrival_time,
            end if error is None else type(error).__name__,
            *counted.story(),
        )


def _salted(request: GenerationRequest) -> GenerationRequest:
    """Return the request with a salt of its tenant's own, which other tenants cannot imitate."""
    salt = f"{len(request.tenant)}:{request.tenant}:{request.cache_salt or ''}"
    return msgspec.structs.replace(request, cache_salt=salt)


def make_service(
    client: EngineClient, config: ServerConfig, front: Service | None = None
) -> Service:
    """Return everything of an app that is fixed once the engine is known.

    Args:
        front: the service of a server of several models, of which this is one: callers, limits and
            stored responses are the server's.
    """
    info = client.info
    template = client.tokenizer.chat_template_source
    names = config.served_model_names or (info.model,)
    is_first = front is not None and names[0] == front.model_name
    metrics = ServerMetrics(
        info,
        lambda: client.stats,
        names[0],
        price_per_hour=config.price_per_hour,
        ready=lambda: service.is_ready,
        max_tenants=config.metrics_tenants,
        known_tenants=frozenset(key.name for key in config.api_keys),
    )
    readers = SlowReaders() if front is None else front.slow_readers
    if is_first and front is not None:
        # the server's metrics have its client's snapshots already
        metrics = front.metrics
    else:
        _listen(client, metrics)
        metrics.registry.register(FaultCollector(lambda: client.faults, readers, names[0]))
    adapters: dict[str, NamedAdapter] = {}
    service = Service(
        client=client,
        config=config,
        rules=RequestRules(
            served_model_names=names,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            # more can never run or wait at once: the queue takes that many only when it is empty
            max_choices=min(
                config.max_choices, info.max_num_seqs, info.max_num_waiting or info.max_num_seqs
            ),
            max_prompts=config.max_prompts,
            max_sequences=None
            if info.max_num_waiting is None
            else info.max_num_waiting + info.max_num_seqs,
            eos_token_ids=client.tokenizer.eos_token_ids,
            default_sampling=dict(config.default_sampling),
            trust_request_chat_template=config.trust_request_chat_template,
            template_kwargs=dict(config.default_chat_template_kwargs),
            draw_seed=_seeds(config.seed),
            strict_fields=config.strict_fields,
            cache_block=info.block_size if info.enable_prefix_caching else 0,
            max_logprobs=info.vocab_size if config.max_logprobs == -1 else config.max_logprobs,
            tells_metrics=config.enable_per_request_metrics,
            slo_classes=dict(CLASSES) | dict(config.slo_classes),
            tool_format=TOOL_FORMATS[config.tool_call_parser]
            if config.tool_call_parser
            else detect_format(template),
            short_call_ids=config.tool_call_parser == "mistral" or wants_short_ids(template),
            thinking=_thinking(client.tokenizer, config.reasoning_parser),
            adapters=adapters,
        ),
        prompts=PromptMaker(client.tokenizer),
        metrics=metrics,
        created=int(time.time()),
        keys=KeyRing(config.api_keys),
        slow_readers=readers,
    )
    if front is None:
        if config.otlp_endpoint:
            service.tracing = Tracing(config.otlp_endpoint, names[0])
        service.limiter = _limiter(config, metrics)
    else:
        service.front, service.responses = front, front.responses
        service.limiter, service.tracing = front.limiter, front.tracing
        if is_first:
            service.under_way = front.under_way
        else:
            front.metrics.others.append(metrics)
    if info.adapter_bytes and isinstance(client, AdapterClient):
        service.adapters = AdapterNames(client, config.adapters, names, adapters)
    return service


def _seeds(seed: int | None) -> Callable[[], int]:
    """Return what draws the seeds of requests without one."""
    if seed is None:
        return lambda: secrets.randbits(63)
    return partial(random.Random(seed).getrandbits, 63)


def _thinking(tokenizer: Tokenizer, parser: str | None) -> Thinking | None:
    """Return the reasoning format of the named parser, or of the chat template."""
    if parser == "none":
        return None
    marks = detect_reasoning(tokenizer.chat_template_source)
    return Thinking.of(marks if parser is None else REASONING_FORMATS[parser], tokenizer)


def _limiter(config: ServerConfig, metrics: ServerMetrics) -> RateLimiter | None:
    """Return the limiter, None without limits. Raises ConfigError like RateStore."""
    own = {key.name: key.limits for key in config.api_keys if key.limits}
    if not own and not config.limits:
        return None
    limiter = RateLimiter(config.limits, own, RateStore(config.rate_limit_storage))
    metrics.registry.register(limiter)
    return limiter


def _listen(client: EngineClient, metrics: ServerMetrics) -> None:
    """Pass every snapshot to ``metrics`` and to earlier listeners: apps may share a client."""
    before = client.on_stats

    def on_stats(stats: EngineStats) -> None:
        if before is not None:
            before(stats)
        metrics.observe_stats(stats)

    client.on_stats = on_stats
