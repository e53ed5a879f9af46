"""What one simulated engine is: its settings and the time that passes outside its steps."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.errors import ConfigError

__all__ = ["Delays", "ReplicaConfig"]


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds outside the steps."""

    # from the caller to the engine's inbox: HTTP, tokenizer, the hop
    inbound: float = 0.0
    # from a step's result to the caller
    outbound: float = 0.0
    # of the engine's thread between a result, or a message that wakes it, and the next plan
    loop: float = 0.0

    def __post_init__(self) -> None:
        if min(self.inbound, self.outbound, self.loop) < 0:
            raise ConfigError(f"delays must be 0 or more seconds, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """One engine, as ``paceline serve`` would be started."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    pipeline_depth: int = 2
    delays: Delays = Delays()
    # what callers ask for where outputs end by themselves; None: exactly what they will get, so
    # that policies know it
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pipeline_depth < 1:
            raise ConfigError(f"pipeline_depth must be at least 1, got {self.pipeline_depth}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
