"""The scheduler's settings: small, frozen, validated at birth."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError

__all__ = ["PREEMPTION_MODES", "CacheConfig", "SchedulerConfig"]

PREEMPTION_MODES = ("auto", "swap", "recompute")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    # tokens per block
    block_size: int
    # blocks in the pool
    num_blocks: int
    # reuse blocks of equal prefixes across requests
    enable_prefix_caching: bool = True
    # blocks of cached prefixes that no request uses are kept up to so many; beyond that the oldest
    # is taken before a block that was never used, whose memory the system may still have; None: all
    max_idle_blocks: int | None = None
    # share of the pool kept free when a request is admitted beside running ones, so that their
    # growth does not at once preempt one of them
    watermark: float = 0.01
    # blocks of host memory that preempted requests may be moved to; 0: they are recomputed
    num_host_blocks: int = 0
    # seconds to move one block to or from host memory, for weighing it against recomputing
    swap_block_seconds: float = 0.0

    def __post_init__(self) -> None:
        _require(self.block_size >= 1, f"block_size must be at least 1, got {self.block_size}")
        _require(self.num_blocks >= 1, f"num_blocks must be at least 1, got {self.num_blocks}")
        _require(
            self.max_idle_blocks is None or self.max_idle_blocks >= 0,
            f"max_idle_blocks must be 0 or more, got {self.max_idle_blocks}",
        )
        _require(0.0 <= self.watermark < 1.0, f"watermark must be in [0, 1), got {self.watermark}")
        _require(
            self.num_host_blocks >= 0 and self.swap_block_seconds >= 0.0,
            f"num_host_blocks={self.num_host_blocks} and "
            f"swap_block_seconds={self.swap_block_seconds} must be 0 or more",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets, order and limits of one scheduler."""

    # tokens computed in one step at most
    max_num_batched_tokens: int = 2048
    # requests running at once at most
    max_num_seqs: int = 256
    # prompt + output of one request at most
    max_model_len: int = 2048
    # pick each step's chunk by its predicted time: the slack that requests with targets leave, and
    # never more than makes steps efficient; False: the whole budget every step
    adaptive_token_budget: bool = True
    # where a step is planned while another runs: so long before that one is predicted to end, so
    # that requests which arrive until then are in the plan. More than steps last: at once
    plan_lead_s: float = 0.002
    # a step for best-effort work alone takes at most so long, or the next arrival waits for it
    best_effort_step_s: float = 0.03
    # a name in paceline.core.policies.POLICIES
    policy: str = "fcfs"
    # policy "priority": waiting this long counts as one priority level
    priority_ageing_s: float = 60.0
    # policy "phase-aligned": arrivals wait for each other this long, or until so many are there
    coalesce_window_s: float = 0.05
    coalesce_size: int = 16
    # best-effort requests are treated as if they had come this much later
    best_effort_delay_s: float = 60.0
    # best-effort requests without any target lengthen the steps of others by this share at most,
    # on average; None: by whatever the others' targets leave
    background_share: float | None = None
    # how many waiting requests behind a head that does not fit are tried in one step
    bypass_window: int = 8
    # how often one head may be passed before all others wait for it
    max_bypasses: int = 64
    # admit a request only if memory is predicted to last until those running end; False: if its
    # known tokens fit now
    future_memory_check: bool = True
    # hold requests back while one more would make every token later than the tightest TPOT target
    pace_admission: bool = True
    # requests that can no longer meet their TTFT target become best effort, so that those behind
    # them still can
    relegate_late: bool = True
    # requests waiting at once at most, best effort included; None: no limit
    max_num_waiting: int | None = None
    # refuse a request whose first token is predicted to take longer; None: never
    max_predicted_wait_s: float | None = None
    # drop a request that waited so long without having started; None: never
    queue_timeout_s: float | None = None
    # what becomes of a preempted request's cache: "swap" moves it to host memory while there is
    # room, "recompute" drops it, "auto" does what is predicted to take less time
    preemption: str = "auto"
    # share of the KV cache in use at which the pressure valve begins to open; 1.0: it stays closed.
    # A server wants it lower (0.88), work that may all wait its turn does not
    pressure_threshold: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self.max_num_seqs >= 1, f"max_num_seqs must be at least 1, got {self.max_num_seqs}"
        )
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
            f"max_num_seqs={self.max_num_seqs}, or running requests could not all advance",
        )
        _require(
            self.max_model_len >= 1, f"max_model_len must be at least 1, got {self.max_model_len}"
        )
        _require(
            self.priority_ageing_s > 0,
            f"priority_ageing_s must be positive, got {self.priority_ageing_s}",
        )
        _require(
            self.coalesce_window_s >= 0 and self.coalesce_size >= 1,
            f"coalesce_window_s={self.coalesce_window_s} must be 0 or more and "
            f"coalesce_size={self.coalesce_size} at least 1",
        )
        _require(
            self.best_effort_delay_s >= 0,
            f"best_effort_delay_s must be 0 or more, got {self.best_effort_delay_s}",
        )
        _require(
            self.bypass_window >= 0, f"bypass_window must be 0 or more, got {self.bypass_window}"
        )
        _require(self.max_bypasses >= 0, f"max_bypasses must be 0 or more, got {self.max_bypasses}")
        _require(
            self.best_effort_step_s > 0,
            f"best_effort_step_s must be positive, got {self.best_effort_step_s}",
        )
        _require(self.plan_lead_s >= 0, f"plan_lead_s must be 0 or more, got {self.plan_lead_s}")
        _require(
            self.background_share is None or 0.0 < self.background_share <= 100.0,
            f"background_share must be above 0 and at most 100, got {self.background_share}",
        )
        for name in ("max_num_waiting", "max_predicted_wait_s", "queue_timeout_s"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be positive or None, got {value}")
        _require(
            self.preemption in PREEMPTION_MODES,
            f"preemption must be one of {', '.join(PREEMPTION_MODES)}, got {self.preemption!r}",
        )
        _require(
            0.0 < self.pressure_threshold <= 1.0,
            f"pressure_threshold must be above 0 and at most 1, got {self.pressure_threshold}",
        )
