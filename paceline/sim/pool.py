"""A simulated pool: the replicas of one model, their router, and whether others decode.

This module does not know time; ``simulator`` runs what is described here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.routing import LeastOutstanding, PredictedRouter, Router
from paceline.sim.replica import ReplicaConfig
from paceline.sim.step_times.base import StepTimes
from paceline.sim.transfer import KVTransfer

__all__ = ["Disaggregation", "Pool", "ReplicaSpec"]


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Configuration and speed of one engine."""

    config: ReplicaConfig
    step_times: StepTimes


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """A second set of replicas that takes over requests after their first token (DistServe,
    OSDI'24, arXiv 2401.09670). Their prefix cache must be on: the keys and values arrive there, in
    whole blocks; the rest of the last block is computed again.

    With ``split_above`` each request is decided on as the gateway does: shorter prompts, and those
    that ``HandOvers`` says so of, are computed where the answer is made. Both routers are then
    ``PredictedRouter``.
    """

    decode: Sequence[ReplicaSpec]
    transfer: KVTransfer
    router: Router
    # None: every request is handed over
    split_above: int | None = None

    def __post_init__(self) -> None:
        if self.split_above is not None and not isinstance(self.router, PredictedRouter):
            raise ConfigError("split_above needs routers that predict")
        if not self.decode:
            raise ConfigError("disaggregation needs at least one decode replica")
        for spec in self.decode:
            if not spec.config.cache.enable_prefix_caching:
                raise ConfigError("decode replicas need enable_prefix_caching: KV arrives there")


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas of one model."""

    replicas: Sequence[ReplicaSpec]
    router: Router
    disaggregation: Disaggregation | None = None

    def __post_init__(self) -> None:
        apart = self.disaggregation
        decides = apart is not None and apart.split_above is not None
        if decides and not isinstance(self.router, PredictedRouter):
            raise ConfigError("split_above needs routers that predict")
        if not self.replicas:
            raise ConfigError("a pool needs at least one replica")

    @classmethod
    def single(cls, config: ReplicaConfig, step_times: StepTimes) -> Pool:
        """Make a pool of one replica."""
        return cls((ReplicaSpec(config, step_times),), LeastOutstanding())
