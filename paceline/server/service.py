"""What every handler of one app shares, and how a request is run on the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import msgspec

from paceline.core.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    RequestFailedError,
)
from paceline.engine.protocol import EngineClient
from paceline.engine.text.output_processor import merge_outputs
from paceline.engine.types import TOO_AMBIGUOUS, EngineStats, GenerationOutput, GenerationRequest
from paceline.http.keys import KeyRing
from paceline.http.rate_limits import RateLimiter, Tally, current_ticket
from paceline.http.rate_limits.store import RateStore
from paceline.http.shortcut import Shortcut
from paceline.http.slow_readers import SlowReaders
from paceline.server.bodies.protocol import RequestRules
from paceline.server.bodies.targets import CLASSES
from paceline.server.config import ServerConfig
from paceline.server.metrics import RequestObserver, ServerMetrics
from paceline.server.metrics.faults import FaultCollector
from paceline.server.prompts import PromptMaker
from paceline.server.response_store import ResponseStore
from paceline.server.tool_formats import TOOL_FORMATS, detect_format
from paceline.server.tracing import Tracing

__all__ = ["Service", "make_service"]

_log = logging.getLogger("paceline.server")

# outputs of a whole answer that are kept before they are joined
_HELD: Final = 256
DRAINING: Final = "the server is shutting down and takes no new requests"


@dataclass(slots=True, kw_only=True, eq=False)
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
    # None: nobody asked for traces
    tracing: Tracing | None = None
    # None where nobody is limited
    limiter: RateLimiter | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)
    # set once the server takes no new generation requests
    draining: bool = False
    # why the engine is gone, once it is
    dead: str | None = None
    # generation requests between arrival and the last byte
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model_name(self) -> str:
        return self.rules.served_model_names[0]

    @property
    def is_ending(self) -> bool:
        """Whether an answer that begins now is the last of its connection."""
        return self.draining or self.dead is not None

    def refuse_if_draining(self) -> None:
        """Raises EngineDeadError or EngineDrainingError once the server ends for that reason."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.draining:
            raise EngineDrainingError(DRAINING)

    def check_health(self) -> None:
        """Return if tokens flow; raise EngineDrainingError, EngineLostError or EngineDeadError
        otherwise."""
        self.refuse_if_draining()
        self.client.check_health()

    @property
    def is_ready(self) -> bool:
        """Whether ``check_health`` returns."""
        try:
            self.check_health()
        except EngineError:
            return False
        return True

    def check_alive(self) -> None:
        """Return unless the engine is gone for good; raises EngineDeadError."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    def enter(self) -> None:
        self.in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    def run(
        self,
        requests: Sequence[GenerationRequest],
        shortcut: Shortcut[GenerationOutput] | None = None,
    ) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
        """Deltas of all requests as they come, each with its request's place in ``requests``. Of a
        single request ``shortcut`` may take some.

        Closing the generator aborts what still runs. With API keys, requests of one tenant find
        cached prefixes of that tenant alone.

        Raises:
            HttpError: 429, the caller's limit is reached.
            RequestError: the engine refused one of them.
            RequestFailedError: one failed inside the engine.
            EngineDrainingError: the server shut down before they were done.
            EngineLostError: the engine is being replaced, and this cannot go on there.
            EngineDeadError: the engine is gone.
        """
        if len(self.keys) and not self.config.share_prefix_cache:
            requests = [_salted(request) for request in requests]
        tally = Tally.of(len(requests))
        outputs = self._run(requests, tally, shortcut)
        ticket = current_ticket()
        if ticket is None or self.limiter is None:
            return outputs
        return self.limiter.metered(
            ticket,
            [len(request.prompt_token_ids) for request in requests],
            sum(request.n * request.sampling.max_tokens for request in requests),
            outputs,
            tally,
        )

    async def _run(
        self,
        requests: Sequence[GenerationRequest],
        tally: Tally,
        shortcut: Shortcut[GenerationOutput] | None,
    ) -> AsyncGenerator[tuple[int, GenerationOutput], None]:
        if len(requests) == 1:
            async with aclosing(self._run_one(requests[0], tally, 0, shortcut)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        # bounded, so that a slow reader slows the engine client down, which merges deltas
        queue: asyncio.Queue[tuple[int, GenerationOutput | Exception | None]]
        queue = asyncio.Queue(2 * len(requests))

        async def pump(index: int, request: GenerationRequest) -> None:
            try:
                async with aclosing(self._run_one(request, tally, index)) as outputs:
                    async for output in outputs:
                        await queue.put((index, output))
            except Exception as error:
                await queue.put((index, error))
            else:
                await queue.put((index, None))

        tasks = [asyncio.ensure_future(pump(i, request)) for i, request in enumerate(requests)]
        try:
            running = len(tasks)
            while running:
                index, item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_one(
        self,
        request: GenerationRequest,
        tally: Tally,
        index: int,
        shortcut: Shortcut[GenerationOutput] | None = None,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Deltas of one request, of whose tokens ``tally`` hears under ``index`` at once."""
        observer = RequestObserver(self.metrics.requests, request)
        trace = None if self.tracing is None else self.tracing.follow(request)
        end, refused, shed = "abort", False, False
        failure: Exception | None = None
        # of a request whose answer goes out whole: what may still turn out to be void
        held: list[GenerationOutput] = []

        def hold(output: GenerationOutput) -> None:
            held.append(output)
            if len(held) >= _HELD:
                held[:] = [merge_outputs(held)]

        def sink(output: GenerationOutput) -> bool:
            """Whatever nobody has to be woken for."""
            for choice in output.choices:
                if choice.finish_reason is not None:
                    return False
            if not request.whole and (shortcut is None or not shortcut.is_open):
                return False
            now = time.monotonic()
            tally.generated[index] = output.num_output_tokens
            observer.output(output, now)
            if trace is not None:
                trace.output(output)
            if request.whole:
                hold(output)
            elif shortcut is not None:
                shortcut.take(output, now)
            return True

        outputs = self.client.generate(request, sink)
        try:
            async for output in outputs:
                if output.restarted:
                    observer.restarted()
                    held.clear()
                    continue
                tally.note(index, output.num_output_tokens)
                observer.output(output, time.monotonic())
                if trace is not None:
                    trace.output(output)
                self._check(output)
                if output.finished:
                    end = "done"
                if not request.whole:
                    yield output
                    continue
                hold(output)
                if output.finished:
                    yield merge_outputs(held)
                else:
                    # the counts
                    yield msgspec.structs.replace(output, choices=(), prompt_logprobs=None)
        except Exception as error:
            end, refused = type(error).__name__, isinstance(error, RequestError)
            shed = isinstance(error, QueueFullError)
            failure = error
            raise
        finally:
            now = time.monotonic()
            observer.close(now, refused=refused, shed=shed)
            if trace is not None:
                trace.end(failure, now)
            await _close(outputs)
            _log.info(
                "request id=%s prompt_tokens=%d output_tokens=%d n=%d seconds=%.3f end=%s "
                "queued=%s waited_for=%s chunks=%s preemptions=%d recomputed_tokens=%s "
                "predicted_ttft=%s ttft=%s tokens_per_second=%s",
                request.request_id,
                len(request.prompt_token_ids),
                observer.num_output_tokens,
                request.n,
                time.monotonic() - request.arrival_time,
                end,
                *observer.story(),
            )

    def _check(self, output: GenerationOutput) -> None:
        for choice in output.choices:
            if choice.finish_reason == "error":
                message = choice.error or "the engine failed on this request"
                if TOO_AMBIGUOUS in message:
                    raise InvalidRequestError(message)
                raise RequestFailedError(message)
            if choice.finish_reason == "abort":
                # nobody else ends a request whose caller still listens
                raise EngineDrainingError("the request was aborted: the server is shutting down")


def _salted(request: GenerationRequest) -> GenerationRequest:
    """With a salt of its tenant's own, in which the caller's cannot stand for another tenant's."""
    salt = f"{len(request.tenant)}:{request.tenant}:{request.cache_salt or ''}"
    return msgspec.structs.replace(request, cache_salt=salt)


async def _close(outputs: AsyncIterator[GenerationOutput]) -> None:
    if isinstance(outputs, AsyncGenerator):
        await outputs.aclose()


def make_service(client: EngineClient, config: ServerConfig) -> Service:
    """Everything of an app that is fixed once the engine is known."""
    info = client.info
    names = config.served_model_names or (info.model,)
    metrics = ServerMetrics(
        info,
        lambda: client.stats,
        names[0],
        price_per_hour=config.price_per_hour,
        ready=lambda: service.is_ready,
    )
    _listen(client, metrics)
    readers = SlowReaders()
    metrics.registry.register(FaultCollector(lambda: client.faults, readers, names[0]))
    service = Service(
        client=client,
        config=config,
        rules=RequestRules(
            served_model_names=names,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            # more can never run or wait at once: the queue takes them only where nobody waits
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
            slo_classes=dict(CLASSES) | dict(config.slo_classes),
            tool_format=TOOL_FORMATS[config.tool_call_parser]
            if config.tool_call_parser
            else detect_format(client.tokenizer.chat_template_source),
        ),
        prompts=PromptMaker(client.tokenizer),
        metrics=metrics,
        created=int(time.time()),
        keys=KeyRing(config.api_keys),
        tracing=Tracing(config.otlp_endpoint, names[0]) if config.otlp_endpoint else None,
        limiter=_limiter(config, metrics),
        slow_readers=readers,
    )
    return service


def _limiter(config: ServerConfig, metrics: ServerMetrics) -> RateLimiter | None:
    """Raises ConfigError like RateStore."""
    own = {key.name: key.limits for key in config.api_keys if key.limits}
    if not own and not config.limits:
        return None
    limiter = RateLimiter(config.limits, own, RateStore(config.rate_limit_storage))
    metrics.registry.register(limiter)
    return limiter


def _listen(client: EngineClient, metrics: ServerMetrics) -> None:
    """Give ``metrics`` every snapshot, beside whoever listens already: apps may share a client."""
    before = client.on_stats

    def on_stats(stats: EngineStats) -> None:
        if before is not None:
            before(stats)
        metrics.observe_stats(stats)

    client.on_stats = on_stats
