"""The engine's inner loop: one scheduler, one backend, one screen.

This module does not know text, sockets or processes; ``engine.loop`` and ``engine.llm`` drive it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from paceline.core.backend import BackendInfo, ModelBackend
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.grammar import ConstrainedBackend, MatcherSource
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.memory.windows import window_blocks_needed
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepResult, TokenLogprobs
from paceline.core.pacing.request_admission import Expired
from paceline.core.request import AdapterUse, FinishReason, Request
from paceline.core.scheduler import Scheduler
from paceline.core.stats import SchedulerStats
from paceline.engine.adapters.store import AdapterStore
from paceline.engine.blocks.keeper import BlockKeeper
from paceline.engine.finished_answers import FinishedAnswers
from paceline.engine.protocol import Sharing
from paceline.engine.recorder import Recorder, Recorders
from paceline.errors import ConfigError, EngineDeadError
from paceline.speculation.drafts import DrafterMaker, Drafts
from paceline.speculation.settings import SpeculationSettings
from paceline.timeline.tap import TimelineTap

__all__ = ["EngineCore", "EngineParts"]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Optional parts of an engine, which owns them from then on."""

    # each gets every request and step; a ``TimelineTap`` among them is the timeline for viewers
    recorders: Sequence[Recorder] = ()
    # compiles grammars; None: structured output is not served
    matchers: MatcherSource | None = None
    # makes the source of a request's draft tokens; None: as the scheduler's configuration says
    drafter: DrafterMaker | None = None
    # adapters of the backend; None: requests have none
    adapters: AdapterStore | None = None
    # makes what keeps KV blocks outside the pool, over the scheduler's own; None: nothing is kept
    blocks: Callable[[KVCacheManager], BlockKeeper] | None = None


class EngineCore:
    """Schedules, executes, updates. Used from one thread.

    Args:
        backend: owned from here on; ``close`` closes it.
        pipeline_depth: steps in the backend at once. 1 plans a step when the one before is done;
            2 plans step N+1 while step N runs, shortly before its end; more plan as soon as there
            is a free slot.
        clock: seconds, monotonic.
        parts: what else it has.
    """

    def __init__(
        self,
        backend: ModelBackend,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        pipeline_depth: int = 2,
        clock: Callable[[], float] = time.monotonic,
        parts: EngineParts = EngineParts(),
    ) -> None:
        _check_matches(backend.info, scheduler, cache, parts.drafter)
        if pipeline_depth < 1:
            raise ConfigError(f"pipeline_depth must be at least 1, got {pipeline_depth}")
        if parts.matchers is not None:
            if not isinstance(backend, ConstrainedBackend):
                raise ConfigError(f"the backend {backend.info.name} cannot apply grammars")
            backend.constrain(parts.matchers)
        self.matchers, self.adapters = parts.matchers, parts.adapters
        speculation = partial(Drafts, make=parts.drafter)
        self.scheduler = Scheduler(scheduler, cache, speculation=speculation)
        kv = self.scheduler.kv
        assert isinstance(kv, KVCacheManager), "no other cache was given"
        self.blocks = None if parts.blocks is None else parts.blocks(kv)
        self._backend = backend
        self._depth = pipeline_depth
        self._clock = clock
        # answers from which later ones are drafted; None: none are kept
        config = scheduler.speculative_config if parts.drafter is None else None
        self.answers = FinishedAnswers.of(config)
        watchers = [*parts.recorders, *([] if self.answers is None else [self.answers])]
        # a single one is called directly
        self._recorder: Recorder | None = Recorders(*watchers) if len(watchers) > 1 else None
        if len(watchers) == 1:
            self._recorder = watchers[0]
        # the driver of this core takes its frames and sends them; None: there is no timeline
        taps = (each for each in parts.recorders if isinstance(each, TimelineTap))
        self.timeline = next(taps, None)
        # plan, time of planning, its result
        self._in_flight: deque[tuple[SchedulerOutput, float, Future[StepResult]]] = deque()
        # a step's result came in since the last plan, so the policy's ``wake_at`` is out of date
        self._has_news = False
        # log-probabilities of prompts from steps, until the driver takes them
        self.prompt_logprobs: list[tuple[str, tuple[TokenLogprobs, ...]]] = []
        # vectors of pooling requests, likewise
        self.pooled: list[tuple[str, bytes]] = []
        self.num_steps = 0
        # called with every plan before it is executed
        self.on_plan: Callable[[SchedulerOutput], None] | None = None
        # who else computes on these processors; None: no other engine
        self.turn: Sharing | None = None

    @property
    def info(self) -> BackendInfo:
        return self._backend.info

    @property
    def pipeline_depth(self) -> int:
        """Number of steps in the backend at once."""
        return self._depth

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight)

    @property
    def num_planned(self) -> int:
        """Number of steps planned since start, of which ``num_steps`` have ended."""
        return self.num_steps + len(self._in_flight)

    def adapter_of(self, request_id: str) -> AdapterUse | None:
        """Return the adapter of a request that has leased one; None while it is not resident."""
        return None if self.adapters is None else self.adapters.use_of(request_id)

    def prompt_seconds(self, num_tokens: int) -> float:
        """Return the seconds to compute a prompt; infinite while no step was measured."""
        state = self.scheduler.state
        return state.work.prompt_seconds(num_tokens) if state.step_time.ready else math.inf

    @property
    def wake_at(self) -> float | None:
        """Time to try again after a step that returned nothing, because the policy holds requests
        back; None: it does not."""
        return None if self._in_flight or self._has_news else self.scheduler.wake_at

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises a RequestError if it is refused."""
        self.scheduler.add_request(request)
        if self._recorder is not None:
            self._recorder.added(request, self._clock())

    def take_expired(self) -> tuple[Expired, ...]:
        """Return requests that were dropped before they were started, once each."""
        expired = self.scheduler.take_expired()
        if expired and self._recorder is not None:
            ended = [name for entry in expired for name in (entry.request_id, *entry.fork_ids)]
            self._recorder.ended(ended, self._clock())
        return expired

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> tuple[RequestUpdate, ...]:
        """End requests as ``Scheduler.abort`` does."""
        updates = self.scheduler.abort(request_ids, reason)
        if updates and self._recorder is not None:
            self._recorder.ended([update.request_id for update in updates], self._clock())
        return updates

    def step(self, take_arrivals: Callable[[], object] | None = None) -> tuple[RequestUpdate, ...]:
        """Keep the backend fed, wait for its oldest step, and return its updates.

        Args:
            take_arrivals: adds the requests that arrived meanwhile, called when a step is about to
                be planned while another runs. Without it no request can arrive, and such a step is
                planned at once.

        Returns () when there is nothing to do, or nothing before ``wake_at``.

        Raises:
            EngineDeadError: the backend broke; the engine cannot go on.
        """
        while len(self._in_flight) < self._depth:
            if self._in_flight and self.scheduler.awaits_tokens:
                break
            if self._in_flight and self._depth == 2 and take_arrivals is not None:
                self._await_planning()
                take_arrivals()
            now = self._clock()
            if self.turn is not None:
                self.scheduler.share(*self.turn.neighbours(now))
            plan = self.scheduler.schedule(now)
            self._has_news = False
            if not plan.rows:
                break
            if self.on_plan is not None:
                self.on_plan(plan)
            note = self.scheduler.note
            if self._recorder is not None and note is not None:
                self._recorder.planned(plan, now, note)
            if self.blocks is not None:
                self.blocks.save_evicted()
            if self.turn is not None and note is not None:
                due = now + note.limit_s + note.predicted_s
                self.turn.planned(note.predicted_s, due, self.scheduler.tightest_tpot)
            self._in_flight.append((plan, now, self._backend.execute(plan)))
        if not self._in_flight:
            if self.scheduler.has_unfinished and self.wake_at is None:
                raise EngineDeadError("the scheduler holds requests but plans nothing")
            return ()
        plan, planned, future = self._in_flight.popleft()
        try:
            result = future.result()
        except Exception as error:
            raise EngineDeadError(f"step {plan.step_id} failed: {error!r}") from error
        self._has_news = True
        self.num_steps += 1
        self.prompt_logprobs += result.prompt_logprobs
        self.pooled += result.pooled
        done = self._clock()
        updates = self.scheduler.update(plan, result, done)
        if self._recorder is not None:
            seconds = result.elapsed + result.drafting
            self._recorder.stepped(plan, planned, done, seconds, updates)
        return updates

    def _await_planning(self) -> None:
        """Return when the next step is due to be planned, or when the running one has ended."""
        left = self.scheduler.plan_at - self._clock()
        if left > 0.0:
            # ``step`` looks at the result later
            with contextlib.suppress(Exception):
                self._in_flight[0][2].result(left)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant of the scheduler holds."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Wait for running steps and close the backend. Idempotent."""
        while self._in_flight:
            self._in_flight.popleft()[2].exception()
        if self.matchers is not None:
            self.matchers.close()
        if self.adapters is not None:
            self.adapters.close()
        if self.blocks is not None:
            self.blocks.close()
        self._backend.close()
        if self._recorder is not None:
            self._recorder.close()


def _check_matches(
    info: BackendInfo, scheduler: SchedulerConfig, cache: CacheConfig, drafter: DrafterMaker | None
) -> None:
    """Raise ConfigError where a backend is not what scheduler and cache were configured for."""
    if cache.block_size != info.block_size or cache.num_blocks > info.num_blocks:
        raise ConfigError(
            f"the scheduler wants {cache.num_blocks} KV blocks of {cache.block_size} tokens, "
            f"the backend has {info.num_blocks} of {info.block_size}"
        )
    windows = cache.num_window_blocks, cache.window
    if windows != (info.num_window_blocks, info.window):
        raise ConfigError(
            f"the scheduler wants {windows[0]} window blocks for a window of {windows[1]} "
            f"tokens, the backend has {info.num_window_blocks} for one of {info.window}"
        )
    needed = window_blocks_needed(scheduler, cache.window, cache.block_size)
    if 0 < cache.num_window_blocks < (least := min(needed, cache.num_blocks)):
        raise ConfigError(
            f"num_window_blocks={cache.num_window_blocks}: {scheduler.max_num_seqs} requests "
            f"with a window of {cache.window} tokens may need {least}"
        )
    if cache.num_host_blocks > info.num_host_blocks:
        raise ConfigError(
            f"the scheduler wants {cache.num_host_blocks} host blocks to swap to, the backend "
            f"has {info.num_host_blocks}"
        )
    speculation = SpeculationSettings.of(scheduler.speculative_config)
    if speculation.models and not info.drafter and drafter is None:
        raise ConfigError(
            f"speculative_config names a draft model, and the backend {info.name} has none"
        )
