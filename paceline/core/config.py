"""The scheduler's settings: small, frozen, validated at birth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Any, Final

from paceline.core.errors import ConfigError
from paceline.core.ranges import Range, outside, ranges_of

__all__ = ["PREEMPTION_MODES", "CacheConfig", "SchedulerConfig"]

PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    # tokens per block
    block_size: Annotated[int, Range(1)]
    # blocks in the pool
    num_blocks: Annotated[int, Range(1)]
    # reuse blocks of equal prefixes across requests
    enable_prefix_caching: bool = True
    # blocks of cached prefixes that no request uses are kept up to so many; beyond that the oldest
    # is taken before a block that was never used, whose memory the system may still have; None: all
    max_idle_blocks: Annotated[int | None, Range(0)] = None
    # share of the pool kept free when a request is admitted beside running ones, so that their
    # growth does not at once preempt one of them
    watermark: Annotated[float, Range(0, 1, below=True)] = 0.01
    # blocks of host memory that preempted requests may be moved to; 0: they are recomputed
    num_host_blocks: Annotated[int, Range(0)] = 0
    # seconds to move one block to or from host memory, for weighing it against recomputing
    swap_block_seconds: Annotated[float, Range(0)] = 0.0
    # where layers with a sliding window have window blocks: tokens that a position may read of
    # them, itself included, and how many there are; 0: such layers keep what the others keep
    window: Annotated[int, Range(0)] = 0
    num_window_blocks: Annotated[int, Range(0)] = 0

    def __post_init__(self) -> None:
        for _, message in outside(self, _CACHE):
            raise ConfigError(message)
        if self.num_window_blocks and self.num_host_blocks:
            windows = f"num_window_blocks={self.num_window_blocks}"
            raise ConfigError(f"{windows} are not swapped: num_host_blocks must be 0 with them")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets, order and limits of one scheduler."""

    # tokens computed in one step at most
    max_num_batched_tokens: int = 2048
    # requests running at once at most
    max_num_seqs: Annotated[int, Range(1)] = 256
    # prompt + output of one request at most
    max_model_len: Annotated[int, Range(1)] = 2048
    # False: every prompt is computed in one step, because its tokens see those behind them too
    enable_chunked_prefill: bool = True
    # pick each step's chunk by its predicted time: the slack that requests with targets leave, and
    # never more than makes steps efficient; False: the whole budget every step
    adaptive_token_budget: bool = True
    # where a step is planned while another runs: so long before that one is predicted to end, so
    # that requests which arrive until then are in the plan. More than steps last: at once
    plan_lead_s: Annotated[float, Range(0)] = 0.002
    # policies "deadline" and "fair": beside streams a step is planned to take at most so long, or
    # their callers would see them stop; None: as long as their mean pace allows
    max_token_gap_s: Annotated[float | None, Range(0, above=True)] = 0.25
    # policy "deadline": targets of a request that asks for none, so that it gets what chats want
    # without asking; and no request that asks for less time yields before that. None: no target
    default_ttft_s: Annotated[float | None, Range(0, above=True)] = None
    default_tpot_s: Annotated[float | None, Range(0, above=True)] = None
    # policy "fair": shares of the tenants named here, where each of the others has 1.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    # a step for best-effort work alone takes at most so long, or the next arrival waits for it
    best_effort_step_s: Annotated[float, Range(0, above=True)] = 0.03
    # a name in paceline.core.policies.POLICIES
    policy: str = "fcfs"
    # policy "priority": waiting this long counts as one priority level
    priority_ageing_s: Annotated[float, Range(0, above=True)] = 60.0
    # policy "phase-aligned": arrivals wait for each other this long, or until so many are there
    coalesce_window_s: Annotated[float, Range(0)] = 0.05
    coalesce_size: Annotated[int, Range(1)] = 16
    # of the engine's seconds, what best effort gets while it waits beside promised work; 0: what
    # that leaves, and nothing more
    best_effort_share: Annotated[float, Range(0, 1, below=True)] = 0.05
    # how many waiting requests behind a head that does not fit are tried in one step
    bypass_window: Annotated[int, Range(0)] = 8
    # how often one head may be passed before all others wait for it
    max_bypasses: Annotated[int, Range(0)] = 64
    # admit a request only if memory is predicted to last until those running end; False: if its
    # known tokens fit now
    future_memory_check: bool = True
    # hold requests back while one more would make every token later than the tightest TPOT target
    pace_admission: bool = True
    # requests that can no longer meet their TTFT target become best effort, so that those behind
    # them still can
    relegate_late: bool = True
    # requests waiting at once at most, best effort included; None: no limit
    max_num_waiting: Annotated[int | None, Range(1)] = None
    # refuse a request whose first token is predicted to take longer than this, and than four times
    # its target; None: never. Best effort asks for no time and is exempt from this and the next
    max_predicted_wait_s: Annotated[float | None, Range(0, above=True)] = None
    # drop a request that waited so long without having started; None: never
    queue_timeout_s: Annotated[float | None, Range(0, above=True)] = None
    # what becomes of a preempted request's cache: "swap" moves it to host memory while there is
    # room, "recompute" drops it, "auto" does what is predicted to take less time
    preemption: str = "auto"
    # how next tokens are guessed, to be verified several in one row: read by the ``Speculation``
    # that the scheduler is given, and refused by a scheduler that is given none. None: as that does
    # where nothing is said
    speculative_config: Mapping[str, Any] | None = None
    # share of the KV cache in use at which the pressure valve begins to open; 1.0: it stays closed.
    # Below 1.0 it is for work whose lengths cannot be predicted
    pressure_threshold: Annotated[float, Range(0, 1, above=True)] = 1.0

    def __post_init__(self) -> None:
        for _, message in outside(self, _SCHEDULER):
            raise ConfigError(message)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}, or running requests could not all advance"
            )
        if not self.enable_chunked_prefill and self.max_model_len > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_model_len={self.max_model_len} must be at most max_num_batched_tokens="
                f"{self.max_num_batched_tokens} where prompts are not computed in chunks"
            )
        wait, timeout = self.max_predicted_wait_s, self.queue_timeout_s
        if wait is not None and timeout is not None and timeout < wait:
            raise ConfigError(
                f"queue_timeout_s={timeout:g} must be at least max_predicted_wait_s={wait:g}, or "
                "requests would be let in that are predicted to be dropped"
            )
        for tenant, weight in self.tenant_weights.items():
            if not (isfinite(weight) and weight > 0.0):
                raise ConfigError(
                    f"tenant_weights must be positive numbers, got {weight} for tenant {tenant!r}"
                )
        if self.preemption not in PREEMPTION_MODES:
            raise ConfigError(
                f"preemption must be one of {', '.join(PREEMPTION_MODES)}, got {self.preemption!r}"
            )


_CACHE: Final = ranges_of(CacheConfig)
_SCHEDULER: Final = ranges_of(SchedulerConfig)
