"""The live engine in virtual time: the real ``EngineLoop`` and ``EngineCore`` over a backend that
sleeps on a virtual clock. The simulator must agree with it, decision by decision: two drivers that
plan alike have the same digest of decisions.

This module does not know the simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.backends.reference.simulated import SimulatedBackend
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.engine.core import EngineCore, EngineParts
from paceline.engine.process.loop import EngineLoop
from paceline.engine.process.messages import Add, ClientMessage, EngineMessage, Outputs, Shutdown
from paceline.engine.recorder import Recorder
from paceline.engine.types import GenerationRequest
from paceline.sim.arrival import Arrival
from paceline.sim.prompts import VOCABULARY, PromptMaker
from paceline.sim.replica import ReplicaConfig, slo_of
from paceline.sim.speculation import drafter_maker
from paceline.sim.step_times.base import StepTimes

__all__ = ["DecisionLog", "run_live"]


class _Clock:
    """A clock that sleeping moves forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Inbox:
    """Delivers arrivals at their time, then a shutdown once everything is answered."""

    def __init__(
        self, clock: _Clock, workload: Iterable[Arrival], config: ReplicaConfig, prefix_block: int
    ) -> None:
        self._clock = clock
        self._prompts = PromptMaker(
            distinct=config.cache.enable_prefix_caching, prefix_block=prefix_block
        )
        self._arrivals = iter(workload)
        self._next = next(self._arrivals, None)
        self._number = 0
        self.num_open = 0

    def receive(self, timeout: float) -> Sequence[ClientMessage]:
        if timeout > 0:
            until = self._clock.now + timeout
            if self._next is not None:
                until = min(until, max(self._clock.now, self._next.at))
            elif not self.num_open:
                return [Shutdown("")]
            self._clock.now = until
        messages: list[ClientMessage] = []
        while self._next is not None and self._next.at <= self._clock.now:
            messages.append(Add(self._request(self._next)))
            self.num_open += 1
            self._next = next(self._arrivals, None)
        return messages

    def _request(self, arrival: Arrival) -> GenerationRequest:
        number = self._number
        self._number += 1
        return GenerationRequest(
            request_id=str(number),
            prompt_token_ids=self._prompts.tokens(arrival, number),
            sampling=SamplingParams(max_tokens=arrival.output_tokens),
            arrival_time=arrival.at,
            priority=arrival.priority,
            slo=slo_of(arrival),
            tenant=arrival.tenant,
        )


class _Logged(SimulatedBackend):
    """Logs every plan that it gets, with its time."""

    def __init__(
        self,
        backend: NullBackend,
        step_times: StepTimes,
        clock: _Clock,
        log: DecisionLog,
        swap_block_seconds: float,
    ) -> None:
        super().__init__(
            backend,
            step_times.seconds,
            clock=clock,
            sleep=clock.sleep,
            swap_block_seconds=swap_block_seconds,
        )
        self._time = clock
        self._log = log

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        self._log.add(plan, self._time.now)
        return super().execute(plan)


def _truth(request: Request, known: int, count: int) -> Sequence[int]:
    """Return the null backend's next tokens."""
    prompt = request.asked.prompt_token_ids
    made = known - request.num_prompt_tokens
    return expected_tokens(prompt, made + count, VOCABULARY)[made:]


def run_live(
    workload: Iterable[Arrival],
    config: ReplicaConfig,
    step_times: StepTimes,
    *,
    prefix_block: int = 512,
    recorder: Recorder | None = None,
) -> DecisionLog:
    """Serve a workload with the live engine, and return its decisions; ``config.delays`` must be
    zero and ``config.max_tokens`` None."""
    clock = _Clock()
    log = DecisionLog()
    backend = _Logged(
        NullBackend(
            vocab_size=VOCABULARY,
            num_blocks=config.cache.num_blocks,
            block_size=config.cache.block_size,
            max_model_len=config.scheduler.max_model_len,
            num_host_blocks=config.cache.num_host_blocks,
        ),
        step_times,
        clock,
        log,
        config.cache.swap_block_seconds,
    )
    core = EngineCore(
        backend,
        config.scheduling,
        config.cache,
        pipeline_depth=config.pipeline_depth,
        clock=clock,
        parts=EngineParts(
            drafter=drafter_maker(config.acceptance, _truth) if config.acceptance else None,
            recorders=() if recorder is None else (recorder,),
        ),
    )
    inbox = _Inbox(clock, workload, config, prefix_block)

    def send(message: EngineMessage) -> None:
        if isinstance(message, Outputs):
            inbox.num_open -= sum(u.finish_reason is not None for u in message.updates)
        else:
            inbox.num_open -= 1

    try:
        EngineLoop(core, inbox, send, clock).run()
    finally:
        core.close()
    return log


class DecisionLog:
    """Digest of plans, which are added in order.

    All of a plan is hashed except the values of sampled tokens, which a simulation does not know.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.num_plans = 0

    def add(self, plan: SchedulerOutput, now: float) -> None:
        """Add a plan. ``now``: the scheduler's time when it made the plan, hashed to the
        microsecond, since a clock that is moved by differences is off by the last bit."""
        self.num_plans += 1
        new = [
            (
                entry.request_id,
                len(entry.token_ids),
                entry.token_ids[: entry.num_prompt_tokens],
                entry.block_ids,
                entry.sampling.max_tokens,
            )
            for entry in plan.new_requests
        ]
        rows = [tuple(row) for row in plan.rows]
        moved: tuple[object, ...] = (plan.block_copies, plan.swaps, plan.released)
        # sources and numbers of drafts: a simulation does not know which tokens they are
        drafts = [(draft.row, len(draft.token_ids)) for draft in plan.drafts]
        moved = (*moved, drafts) if drafts else moved
        decided = (plan.step_id, f"{now:.6f}", rows, new, moved, plan.num_tokens)
        self._hash.update(repr(decided).encode())

    def digest(self) -> str:
        """Return the digest of all plans so far."""
        return self._hash.hexdigest()
