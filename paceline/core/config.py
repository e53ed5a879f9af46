"""The scheduler's settings: small, frozen, validated at birth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Any, Final

from paceline.errors import ConfigError
from paceline.ranges import Range, outside, ranges_of

__all__ = ["PREEMPTION_MODES", "CacheConfig", "SchedulerConfig"]

PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes of the paged KV cache."""

    # tokens per block
    block_size: Annotated[int, Range(1)]
    # blocks in the pool
    num_blocks: Annotated[int, Range(1)]
    # reuse blocks of equal prefixes across requests
    enable_prefix_caching: bool = True
    # most blocks of cached prefixes that no request uses; beyond that the oldest is reused before a
    # block that was never used, whose memory the system may still have; None: no limit
    max_idle_blocks: Annotated[int | None, Range(0)] = None
    # share of the pool kept free for the growth of running requests when another is admitted
    watermark: Annotated[float, Range(0, 1, below=True)] = 0.01
    # blocks of host memory that preempted requests may be moved to; 0: they are recomputed
    num_host_blocks: Annotated[int, Range(0)] = 0
    # seconds to move one block to or from host memory, to compare with the time to recompute it
    swap_block_seconds: Annotated[float, Range(0)] = 0.0
    # where layers with a sliding window have blocks of their own: tokens that a position reads in
    # them, itself included, and the number of these blocks; 0: those layers use the ordinary blocks
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
    # different adapters of the requests running at once at most; None: any number
    max_adapters: Annotated[int | None, Range(1)] = None
    # prompt + output of one request at most
    max_model_len: Annotated[int, Range(1)] = 2048
    # False: every prompt is computed in one step, because its tokens attend to later ones too
    enable_chunked_prefill: bool = True
    # pick each step's chunk by its predicted time: at most the slack of requests with targets, and
    # no more than makes steps efficient; False: the whole budget every step
    adaptive_token_budget: bool = True
    # plan a step this many seconds before the running one is predicted to end, so that requests
    # which arrive until then are in the plan. More than a step lasts: plan at once
    schedule_ahead_s: Annotated[float, Range(0)] = 0.002
    # policies "deadline" and "fair": longest planned time of a step while answers are streamed, so
    # that the streams do not stall; None: as long as the mean pace of the streams allows
    max_token_gap_s: Annotated[float | None, Range(0, above=True)] = 0.25
    # policy "deadline": targets of a request that asks for none, chosen for chats. No request
    # is demoted before ``default_ttft_s``, even if its own target is tighter. None: no target
    default_ttft_s: Annotated[float | None, Range(0, above=True)] = None
    default_tpot_s: Annotated[float | None, Range(0, above=True)] = None
    # policy "fair": shares of the tenants named here; every other tenant has 1.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    # longest time of a step for best-effort work alone, as the next arrival waits until it ends
    best_effort_step_s: Annotated[float, Range(0, above=True)] = 0.03
    # a name in paceline.core.policies.POLICIES
    policy: str = "fcfs"
    # policy "priority": waiting this long counts as one priority level
    priority_ageing_s: Annotated[float, Range(0, above=True)] = 60.0
    # policy "phase-aligned": arrivals wait for each other this long, or for this many of them
    coalesce_window_s: Annotated[float, Range(0)] = 0.05
    coalesce_size: Annotated[int, Range(1)] = 16
    # share of the engine's time that best-effort work gets while it waits; 0: only what is left
    best_effort_share: Annotated[float, Range(0, 1, below=True)] = 0.05
    # number of waiting requests behind a head that does not fit that may skip ahead in one step
    max_skip_ahead: Annotated[int, Range(0)] = 8
    # number of times that a head may be skipped before all others wait for it
    max_skips: Annotated[int, Range(0)] = 64
    # admit a request only if memory is predicted to last; False: if its known tokens fit now
    future_memory_check: bool = True
    # hold requests back while one more would delay every token beyond the tightest TPOT target
    pace_admission: bool = True
    # requests that can no longer meet their TTFT target become best effort, so that requests behind
    # them still meet theirs
    demote_late: bool = True
    # requests waiting at once at most, best effort included; None: no limit
    max_num_waiting: Annotated[int | None, Range(1)] = None
    # refuse a request whose predicted time to first token is above this and above four times its
    # target; None: never. Best effort has no target and is exempt from this and the next
    max_predicted_ttft_s: Annotated[float | None, Range(0, above=True)] = None
    # a request that waited this long without having started expires; None: never
    queue_timeout_s: Annotated[float | None, Range(0, above=True)] = None
    # how a preempted request's cache is restored: "swap" moves it to host memory while there is
    # room, "recompute" drops it, "auto" does what is predicted to take less time
    preemption: str = "auto"
    # how draft tokens are made, several of which are verified in one row: read by the
    # ``Speculation`` that the scheduler is given, and refused without one. None: its default
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
        wait, timeout = self.max_predicted_ttft_s, self.queue_timeout_s
        if wait is not None and timeout is not None and timeout < wait:
            raise ConfigError(
                f"queue_timeout_s={timeout:g} must be at least max_predicted_ttft_s={wait:g}, or "
                "requests would be let in that are predicted to expire"
            )
        for tenant, weight in self.tenant_weights.items():
            if not (isfinite(weight) and weight > 0.0):
                found = f"{weight} for tenant {tenant!r}"
                raise ConfigError(f"tenant_weights must be positive numbers, got {found}")
        if self.preemption not in PREEMPTION_MODES:
            modes = ", ".join(PREEMPTION_MODES)
            raise ConfigError(f"preemption must be one of {modes}, got {self.preemption!r}")


_CACHE: Final = ranges_of(CacheConfig)
_SCHEDULER: Final = ranges_of(SchedulerConfig)
