"""The engine's main loop, the same in a process of its own and on a thread.

::

    while not shut down:
        take every message that is there      (waits only when there is nothing to do)
        core.step()                           (takes messages again before it plans ahead)
        send the news of the step, in one message

This module does not know sockets, processes or text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from msgspec.structs import replace

from paceline.core.outputs import RequestUpdate
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.engine.adapters.store import AdapterStore
from paceline.engine.core import EngineCore
from paceline.engine.fanout import add_to_core, check_token_ids, request_of
from paceline.engine.process.arrivals import Arrivals
from paceline.engine.process.in_flight import InFlightFile
from paceline.engine.process.messages import (
    Abort,
    Add,
    ClientMessage,
    EngineMessage,
    LoadAdapter,
    Outputs,
    Refused,
    Shutdown,
    TimelineNews,
    UnloadAdapter,
)
from paceline.engine.process.readiness import Readiness
from paceline.engine.types import AdapterStats, ClassUse, EngineInfo, EngineStats, GenerationRequest
from paceline.errors import RequestError

__all__ = ["EngineLoop", "Inbox", "engine_info", "engine_stats", "take_census"]

# seconds between heartbeats of an idle engine
_BEAT: Final = 1.0
# seconds between checks of requests that wait for their grammar, when there is no other work
_READINESS: Final = 0.002
# seconds between counts of running and waiting requests, while there is work; more for many
# requests, so that counting takes at most a percent of the time
_CENSUS: Final = 0.1
_CENSUS_PER_REQUEST: Final = 2e-5
# seconds of quiet before an idle engine checks its integrity, so that no request waits for that
_QUIET: Final = 0.05


class Inbox(Protocol):
    """Source of messages for the engine."""

    def receive(self, timeout: float) -> Sequence[ClientMessage]:
        """Return every message received. Waits up to ``timeout`` seconds for the first; 0 does not
        wait. Empty when none came."""


class EngineLoop:
    """Drives one core from one thread.

    Args:
        send: takes every message for the client, in order; must not block.
        at_rest: called once whenever there has been nothing to do for a moment.
        in_flight: gets the requests that are worked on.
        arrivals: requests that wait for KV blocks; None: made where the core keeps blocks.
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox,
        send: Callable[[EngineMessage], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        at_rest: Callable[[], object] = lambda: None,
        in_flight: InFlightFile | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._core = core
        self._in_flight = in_flight
        if in_flight is not None:
            core.on_plan = in_flight.step
            if core.adapters is not None:
                core.adapters.on_loading = in_flight.loading
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._at_rest = at_rest
        if arrivals is None and core.blocks is not None:
            arrivals = Arrivals(core.blocks, core.prompt_seconds, core.adapter_of)
        self._arrivals = arrivals
        longest = core.scheduler.config.max_predicted_ttft_s
        self._readiness = Readiness(core.matchers, core.adapters, longest)
        self._shutdown: Shutdown | None = None
        # updates of aborts, sent with the next step's
        self._updates: list[RequestUpdate] = []
        # tokens of the prompts after which a first token was sent
        self._prompt_tokens = 0
        self._classes: tuple[ClassUse, ...] = ()
        self._adapter_stats: AdapterStats | None = None
        self._next_census = 0.0
        # whether a request may have ended since leases of adapters were last looked at
        self._ends = False

    def run(self) -> Shutdown:
        """Run until a Shutdown arrives, and return it.

        Raises:
            Exception: any error of ``core.step`` or ``core.check_integrity``; the core cannot
                go on.
        """
        try:
            return self._run()
        finally:
            if self._arrivals is not None:
                self._arrivals.close()

    def _run(self) -> Shutdown:
        self._flush()
        checked = False
        while True:
            came = self._take(self._patience(self._core.has_work, checked))
            if self._shutdown is not None:
                return self._shutdown
            if self._core.has_work:
                checked = False
                self._step()
            elif self._waits and not self._updates:
                # there will soon be work: neither a heartbeat nor a check
                self._tell_timeline()
            elif came or checked:
                if self._core.blocks is not None:
                    self._core.blocks.save_idle(self._core.num_steps)
                self._flush()
            else:
                self._core.check_integrity()
                self._at_rest()
                self._tell_timeline(idle=True)
                checked = True

    @property
    def _waits(self) -> bool:
        """Whether requests wait outside the scheduler, or peers for blocks."""
        blocks = self._core.blocks
        return bool(self._readiness or self._arrivals or (blocks is not None and blocks.is_busy))

    def _patience(self, busy: bool, checked: bool) -> float:
        """Return the seconds to wait for a message: 0 while there is something to compute."""
        if not busy:
            adapters = self._core.adapters
            if self._waits or (adapters is not None and (self._ends or adapters.is_busy)):
                return _READINESS
            return _BEAT if checked else _QUIET
        wake_at = self._core.wake_at
        return 0.0 if wake_at is None else min(_BEAT, max(0.0, wake_at - self._clock()))

    def _step(self) -> None:
        self._updates += self._core.step(self._take)
        if self._core.adapters is not None:
            self._ends = self._ends or any(each.finish_reason for each in self._updates)
        for expired in self._core.take_expired():
            self._ends = True
            self._send(Refused.of(request_of(expired.request_id), expired.error))
        self._flush()

    def _take(self, patience: float = 0.0) -> bool:
        """Handle all messages received; wait up to ``patience`` seconds for one. Returns whether
        any came."""
        messages = self._inbox.receive(patience)
        for message in messages:
            if isinstance(message, Shutdown):
                self._shutdown = message
                break
            self._handle(message)
        if self._core.adapters is not None:
            self._poll_adapters(self._core.adapters)
        if self._readiness:
            self._admit_ready()
        if self._core.blocks is not None:
            self._core.blocks.poll(self._core.num_steps, self._core.num_planned)
        if self._arrivals:
            self._admit_arrived(self._arrivals)
        return bool(messages)

    def _poll_adapters(self, adapters: AdapterStore) -> None:
        """End leases of requests that have ended, and take in what was loaded."""
        if adapters.has_leases and self._ends:
            live = {request_of(request.request_id) for request in self._core.scheduler.requests}
            arriving = () if self._arrivals is None else self._arrivals.request_ids
            adapters.release_except(live | {*self._readiness.request_ids, *arriving})
        self._ends = False
        if adapters.is_busy or self._readiness:
            adapters.poll(self._clock(), is_computing=self._core.has_work)
        for news in adapters.take_news():
            self._send(news)

    def _handle(self, message: Add | Abort | LoadAdapter | UnloadAdapter) -> None:
        if isinstance(message, (LoadAdapter, UnloadAdapter)):
            self._change_adapters(message)
            return
        if isinstance(message, Abort):
            self._ends = True
            self._updates += self._readiness.abort(message.request_ids)
            if self._arrivals:
                self._updates += self._arrivals.abort(message.request_ids)
            self._tell_readiness()
            reason = FinishReason.STOP if message.stopped else FinishReason.ABORT
            self._updates += self._core.abort(message.request_ids, reason)
            return
        with self._taking_in(message.request) as request:
            if not self._hold(request):
                self._fetch_or_add(request, 0.0)
            elif (timeline := self._core.timeline) is not None:
                name, slo = request.request_id, request.slo
                timeline.door.hold(name, slo.slo_class, request.tenant, request.arrival_time)

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        adapters = self._core.adapters
        assert adapters is not None, "an engine without adapters was sent one"
        if isinstance(message, LoadAdapter):
            adapters.register(message.key, message.path, message.digest, pinned=message.pinned)
        else:
            adapters.forget(message.key)

    @contextmanager
    def _taking_in(self, request: GenerationRequest) -> Iterator[GenerationRequest]:
        """Send a refusal to the caller; any other error ends the engine, blamed on this request."""
        try:
            yield request
        except RequestError as error:
            self._ends = True
            refused = Refused.of(request.request_id, error)
            self._send(refused)
            if (timeline := self._core.timeline) is not None:
                name, slo, now = request.request_id, request.slo, self._clock()
                kind = refused.reason or refused.kind
                timeline.door.refuse(name, slo.slo_class, request.tenant, now, kind)
        except Exception:
            if self._in_flight is not None:
                self._in_flight.aside((request.request_id,))
            raise

    def _hold(self, request: GenerationRequest) -> bool:
        """Whether the request must wait for its grammar."""
        if self._in_flight is None or request.sampling.grammar is None:
            return self._readiness.hold(request, self._clock())
        # a crashing compiler may end the process
        self._in_flight.aside((*self._readiness.request_ids, request.request_id))
        try:
            return self._readiness.hold(request, self._clock())
        finally:
            self._in_flight.aside(self._readiness.request_ids)

    def _admit_ready(self) -> None:
        taken = self._readiness.take(self._clock())
        if taken:
            self._tell_readiness()
        if taken and self._in_flight is not None:
            self._in_flight.aside(self._readiness.request_ids)
        for ready, refusal, waited in taken:
            with self._taking_in(ready) as request:
                if waited and self._core.adapters is not None:
                    self._core.adapters.note_wait(waited)
                if refusal is not None:
                    raise refusal
                self._fetch_or_add(request, waited)

    def _fetch_or_add(self, request: GenerationRequest, waited: float) -> None:
        """Queue a request, unless blocks of it are worth waiting for."""
        if self._arrivals is not None:
            check_token_ids(request, self._core.info.vocab_size)
            if self._arrivals.hold(request, self._clock(), waited):
                return
        add_to_core(self._core, request, waited)

    def _admit_arrived(self, arrivals: Arrivals) -> None:
        for arrived, waited in arrivals.take(self._clock()):
            with self._taking_in(arrived) as request:
                add_to_core(self._core, request, waited)

    def _tell_readiness(self) -> None:
        if self._core.timeline is not None:
            self._core.timeline.door.keep(self._readiness.request_ids)

    def _flush(self) -> None:
        now = self._clock()
        if now >= self._next_census or not self._core.has_work:
            self._classes = take_census(self._core.scheduler.requests)
            if self._core.adapters is not None:
                self._adapter_stats = self._core.adapters.stats(
                    {
                        request_of(each.request_id)
                        for each in self._core.scheduler.requests
                        if each.status is RequestStatus.RUNNING and each.asked.adapter
                    }
                )
            counted = sum(use.num_running + use.num_waiting for use in self._classes)
            self._next_census = now + max(_CENSUS, counted * _CENSUS_PER_REQUEST)
        stats = engine_stats(self._core, now, self._classes, self._adapter_stats)
        tokens = sum([len(update.new_token_ids) for update in self._updates])
        if tokens or self._core.pooled:
            # vLLM's way to count: all tokens of a prompt, in the step that sampled the first one
            # after it, or made its vector
            prompts, self._prompt_tokens = self._prompt_tokens, stats.scheduler.num_prompt_tokens
            stats = replace(stats, iteration_tokens=(tokens + self._prompt_tokens - prompts,))
        logprobs, pooled = tuple(self._core.prompt_logprobs), tuple(self._core.pooled)
        self._send(Outputs(tuple(self._updates), stats, logprobs, pooled))
        self._core.prompt_logprobs.clear()
        self._core.pooled.clear()
        self._updates.clear()
        self._tell_timeline()

    def _tell_timeline(self, *, idle: bool = False) -> None:
        timeline = self._core.timeline
        if timeline is not None and (frames := timeline.take(self._clock(), idle=idle)):
            self._send(TimelineNews(frames))


def engine_stats(
    core: EngineCore,
    now: float,
    classes: tuple[ClassUse, ...] = (),
    adapters: AdapterStats | None = None,
) -> EngineStats:
    """Take a snapshot of ``core`` for the client."""
    return EngineStats(
        time=now,
        num_steps=core.num_steps,
        scheduler=core.stats(),
        classes=classes,
        finished_answers_bytes=0 if core.answers is None else core.answers.num_bytes,
        blocks=None if core.blocks is None else core.blocks.stats(),
        adapters=adapters,
    )


def engine_info(core: EngineCore, model: str) -> EngineInfo:
    """Describe a core, under the name by which it is served."""
    backend, config, cache = core.info, core.scheduler.config, core.scheduler.cache
    return EngineInfo(
        model=model,
        backend=backend.name,
        device=backend.device,
        dtype=backend.dtype,
        max_model_len=min(backend.max_model_len, config.max_model_len),
        vocab_size=backend.vocab_size,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy=config.policy,
        enable_prefix_caching=cache.enable_prefix_caching,
        kv_dtype=backend.kv_dtype or backend.dtype,
        block_bytes=backend.block_bytes,
        window_bytes=backend.num_window_blocks * backend.window_block_bytes,
        num_window_blocks=backend.num_window_blocks,
        choice=backend.choice,
        numa_nodes=backend.numa_nodes,
        max_num_waiting=config.max_num_waiting,
        pooling=backend.pooling,
        adapter_bytes=0 if core.adapters is None else core.adapters.books.max_bytes,
        kv_fingerprint="" if core.blocks is None else core.blocks.fingerprint.hex(),
        kv_port=0 if core.blocks is None else core.blocks.port,
        max_adapters=config.max_adapters,
    )


def take_census(requests: Iterable[Request]) -> tuple[ClassUse, ...]:
    """Return the classes that have a request, sorted by name. Takes time in proportion to the
    requests, not to their blocks: too long for every step."""
    counts: dict[str, list[int]] = {}
    for request in requests:
        use = counts.setdefault(request.asked.slo.slo_class, [0, 0, 0])
        use[request.status is not RequestStatus.RUNNING] += 1
        use[2] += len(request.block_ids)
    return tuple(ClassUse(name, *counts[name]) for name in sorted(counts))
