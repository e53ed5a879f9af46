"""Advice before hardware is bought: by arithmetic where that holds, by simulation where not."""

from __future__ import annotations

from paceline.sim.plan.batching import BatchingEstimate, estimate_batching, expected_longest
from paceline.sim.plan.fleet import FleetAnswer, FleetOption, best_fleet, run_fleet
from paceline.sim.plan.memory import PRESETS, MemoryPlan, Preset, plan_memory
from paceline.sim.plan.models import find_model
from paceline.sim.plan.search import Found, Target, highest_rate, smallest_fleet
from paceline.sim.plan.split import SplitEstimate, estimate_split

__all__ = [
    "PRESETS",
    "BatchingEstimate",
    "FleetAnswer",
    "FleetOption",
    "Found",
    "MemoryPlan",
    "Preset",
    "SplitEstimate",
    "Target",
    "best_fleet",
    "estimate_batching",
    "estimate_split",
    "expected_longest",
    "find_model",
    "highest_rate",
    "plan_memory",
    "run_fleet",
    "smallest_fleet",
]
