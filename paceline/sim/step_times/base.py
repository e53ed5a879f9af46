"""Interface of all sources of a simulated step's seconds: one method."""

from __future__ import annotations

from typing import Protocol

from paceline.core.outputs import SchedulerOutput

__all__ = ["FixedStepTimes", "StepTimes"]


class StepTimes(Protocol):
    """A model of one replica's speed. Called once per plan, in the order the plans are made; an
    implementation with noise advances its own seeded generator and nothing else."""

    def seconds(self, plan: SchedulerOutput) -> float:
        """Return the seconds, above 0, from the start of this step to its result, on an otherwise
        idle backend. ``plan`` has at least one row."""


class FixedStepTimes:
    """Steps of ``base + per_token * tokens`` seconds: results can be checked by hand."""

    def __init__(self, base: float, per_token: float = 0.0) -> None:
        self._base = base
        self._per_token = per_token

    def seconds(self, plan: SchedulerOutput) -> float:
        return self._base + self._per_token * plan.num_tokens
