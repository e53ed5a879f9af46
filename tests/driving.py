"""Small makers and a synchronous driver shared by the tests of core and backends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.backends.reference.null import NullBackend
from paceline.core.backend import ModelBackend
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.windows import window_blocks_needed
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepResult, Timeline
from paceline.core.pacing.request_admission import Expired
from paceline.core.predict.step_time import StepShape
from paceline.core.request import AdapterUse, Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.slo import NO_SLO, Slo
from paceline.core.tier import tier_of
from paceline.speculation.drafts import DrafterMaker, Drafts


def make_request(
    request_id: str,
    prompt: Sequence[int] | int,
    max_tokens: int = 8,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    cache_salt: str | None = None,
    fork_of: str | None = None,
    slo: Slo = NO_SLO,
    tenant: str = "",
    **sampling: Any,
) -> Request:
    """A request; an int prompt means that many tokens 1, 2, 3, ..."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    return Request(
        RequestSpec(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            arrival_time=arrival,
            priority=priority,
            cache_salt=cache_salt,
            fork_of=fork_of,
            slo=slo,
            tenant=tenant,
        )
    )


def ask(request: Request, **asked: Any) -> Request:
    """Change what a request that was not added yet, or is under way, asks for; returns it."""
    request.asked = replace(request.asked, **asked)
    if "slo" in asked:
        request.targets, request.tier = request.asked.slo, tier_of(request.asked.slo)
    return request


def adapter_use(slot: int, scale: float = 1.0) -> AdapterUse:
    """An adapter of 100 bytes, with 10 products for each token."""
    return AdapterUse(bytes([slot, int(10 * scale)]) * 16, slot, scale, 100, 10)


class Driver:
    """A scheduler over a backend (the null backend by default) with a hand-moved clock.

    Checks, at every step, the budget, the plan's consistency and the scheduler's integrity.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        watermark: float = 0.0,
        enable_prefix_caching: bool = True,
        max_idle_blocks: int | None = None,
        vocab_size: int = 997,
        depth: int = 1,
        poison_token: int | None = None,
        num_host_blocks: int = 0,
        swap_block_seconds: float = 0.0,
        backend: ModelBackend | None = None,
        seconds: Callable[[StepShape], float] | None = None,
        drafter: DrafterMaker | None = None,
        draft_wrong: Collection[int] | None = None,
        window: int = 0,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "max_model_len": 1024,
            # what is not under test stays out of the way
            "future_memory_check": False,
            "max_token_gap_s": None,
        }
        self.config = SchedulerConfig(**(defaults | config))
        # as few as are enough
        needed = window_blocks_needed(self.config, window, block_size)
        windows: dict[str, Any] = {
            "window": window,
            "num_window_blocks": min(num_blocks, needed) if window else 0,
        }
        self.cache = CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            watermark=watermark,
            enable_prefix_caching=enable_prefix_caching,
            max_idle_blocks=max_idle_blocks,
            num_host_blocks=num_host_blocks,
            swap_block_seconds=swap_block_seconds,
            **windows,
        )
        speculation = partial(Drafts, make=drafter)
        self.scheduler = Scheduler(self.config, self.cache, speculation=speculation)
        self.backend = backend or NullBackend(
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=self.config.max_model_len,
            poison_token=poison_token,
            num_host_blocks=num_host_blocks,
            draft_wrong=draft_wrong,
            **windows,
        )
        self.depth = depth
        self.seconds = seconds
        self.now = 0.0
        self.plans: list[SchedulerOutput] = []
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, RequestUpdate] = {}
        # what was told of those under way, in order
        self.told: dict[str, list[Timeline]] = defaultdict(list)
        self.expired: list[Expired] = []
        self._flying: list[tuple[SchedulerOutput, StepResult]] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def abort(self, *request_ids: str) -> None:
        self._take(self.scheduler.abort(request_ids))

    def plan(self) -> SchedulerOutput:
        """Plan and run one step, leaving its result in flight."""
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        assert sum(row.num_tokens for row in plan.rows) == plan.num_tokens
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        assert all(row.num_tokens >= 1 for row in plan.rows)
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        started = {new.request_id for new in plan.new_requests}
        dropped = set(plan.released) - started
        assert not dropped & {row.request_id for row in plan.rows}, "a row of a dropped request"
        self.expired += self.scheduler.take_expired()
        if plan.rows:
            self.plans.append(plan)
            result = self.backend.execute(plan).result()
            # what the null backend really took is noise: steps take what the test says
            elapsed = self.seconds(StepShape.of(plan.rows)) if self.seconds else 0.0
            self._flying.append((plan, replace(result, elapsed=elapsed)))
        return plan

    def settle(self) -> None:
        """Take in the oldest result in flight."""
        plan, result = self._flying.pop(0)
        self._take(self.scheduler.update(plan, result, self.now))
        self.scheduler.check_integrity()

    def step(self) -> bool:
        """One turn of an engine with ``depth`` steps in flight; False when nothing moved."""
        while len(self._flying) < self.depth:
            if (self._flying and self.scheduler.awaits_tokens) or not self.plan().rows:
                break
        self.now += 1.0
        if not self._flying:
            return self.scheduler.wake_at is not None
        self.settle()
        return True

    def run(self, max_steps: int = 10_000) -> None:
        """Until idle; fails if requests are left and nothing moves."""
        for _ in range(max_steps):
            if not self.step():
                break
        assert not self.scheduler.has_unfinished, "requests are stuck"
        assert self.scheduler.kv.pool.num_free == self.cache.num_blocks, "blocks leaked"

    def _take(self, updates: Iterable[RequestUpdate]) -> None:
        for update in updates:
            assert update.request_id not in self.finished, "news of a finished request"
            self.tokens[update.request_id].extend(update.new_token_ids)
            if update.finish_reason is not None:
                self.finished[update.request_id] = update
            elif update.timeline is not None:
                self.told[update.request_id].append(update.timeline)
