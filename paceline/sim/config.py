"""What one simulated engine is: its settings and the time that passes outside its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.errors import ConfigError
from paceline.sim.speculation import check_acceptance
from paceline.speculation.settings import SpeculationSettings

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
    # how often a guessed token is right by its place in the row, those before it being right, and
    # so many are guessed at most; (): none are, whatever the engine's settings say
    acceptance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.pipeline_depth < 1:
            raise ConfigError(f"pipeline_depth must be at least 1, got {self.pipeline_depth}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        SpeculationSettings.of(self.scheduler.speculative_config)
        check_acceptance(self.acceptance)

    @property
    def scheduling(self) -> SchedulerConfig:
        """The scheduler's settings, with guesses where it is said how often they are right."""
        config: Mapping[str, Any] | None = None
        if self.acceptance:
            config = self.scheduler.speculative_config or {"method": "auto"}
        if config == self.scheduler.speculative_config:
            return self.scheduler
        return replace(self.scheduler, speculative_config=config)
