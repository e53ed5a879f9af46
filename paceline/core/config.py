"""The scheduler's settings: small, frozen, validated at birth."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError

__all__ = ["CacheConfig", "SchedulerConfig"]


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
    # share of the pool kept free when a request is admitted beside running ones, so that their
    # growth does not at once preempt somebody
    watermark: float = 0.01

    def __post_init__(self) -> None:
        _require(self.block_size >= 1, f"block_size must be at least 1, got {self.block_size}")
        _require(self.num_blocks >= 1, f"num_blocks must be at least 1, got {self.num_blocks}")
        _require(0.0 <= self.watermark < 1.0, f"watermark must be in [0, 1), got {self.watermark}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets, order and limits of one scheduler."""

    # tokens computed in one step at most
    max_num_batched_tokens: int = 2048
    # requests running at once at most
    max_num_seqs: int = 256
    # prompt + output of one request at most
    max_model_len: int = 2048
    # spend the slack that requests with TPOT targets leave, instead of the whole budget every step;
    # without targets it changes nothing
    adaptive_token_budget: bool = True
    # a name in paceline.core.policies.POLICIES
    policy: str = "fcfs"
    # policy "priority": waiting this long counts as one priority level
    priority_ageing_s: float = 60.0
    # policy "phase-aligned": arrivals wait for each other this long, or until so many are there
    coalesce_window_s: float = 0.05
    coalesce_size: int = 16
    # best-effort requests are treated as if they had come this much later
    best_effort_delay_s: float = 60.0
    # how many waiting requests behind a head that does not fit are tried in one step
    bypass_window: int = 8
    # how often one head may be passed before everybody waits for it
    max_bypasses: int = 64

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
