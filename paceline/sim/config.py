"""Configuration of one simulated engine: its settings, and the time outside its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.errors import ConfigError
from paceline.sim.adapters import AdapterSettings
from paceline.sim.speculation import check_acceptance
from paceline.speculation.settings import SpeculationSettings

__all__ = ["Delays", "ReplicaConfig"]


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds outside the steps."""

    # from the caller to the engine's inbox: HTTP, tokenizer, transfer between processes
    inbound: float = 0.0
    # from a step's result to the caller
    outbound: float = 0.0
    # between a result, or a message that wakes the engine's thread, and the next plan
    loop: float = 0.0

    def __post_init__(self) -> None:
        if min(self.inbound, self.outbound, self.loop) < 0:
            raise ConfigError(f"delays must be 0 or more seconds, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Settings of one engine, as those of ``paceline serve``."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    pipeline_depth: int = 2
    delays: Delays = Delays()
    # max_tokens of requests whose outputs end earlier; None: exactly the tokens that they will get,
    # so that policies know their number
    max_tokens: int | None = None
    # probability that a draft is right, by its index in the row, given that those before it are; at
    # most this many drafts are made; (): none, whatever the engine's settings say
    acceptance: tuple[float, ...] = ()
    # of requests that have one
    adapters: AdapterSettings = field(default_factory=AdapterSettings)

    def __post_init__(self) -> None:
        if self.pipeline_depth < 1:
            raise ConfigError(f"pipeline_depth must be at least 1, got {self.pipeline_depth}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        SpeculationSettings.of(self.scheduler.speculative_config)
        check_acceptance(self.acceptance)

    @property
    def scheduling(self) -> SchedulerConfig:
        """Return the scheduler's settings, with drafts only where their acceptance is given."""
        config: Mapping[str, Any] | None = None
        if self.acceptance:
            config = self.scheduler.speculative_config or {"method": "auto"}
        if config == self.scheduler.speculative_config:
            return self.scheduler
        return replace(self.scheduler, speculative_config=config)
