"""Advice before hardware is bought: by arithmetic where that holds, else by simulation.

Names are loaded on demand: the command line's --help needs only the presets, without numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "BatchingEstimate": "batching",
    "FleetAnswer": "fleet",
    "FleetOption": "fleet",
    "Found": "search",
    "MemoryPlan": "memory",
    "PRESETS": "memory",
    "Preset": "memory",
    "SplitEstimate": "split",
    "Target": "search",
    "best_fleet": "fleet",
    "estimate_batching": "batching",
    "estimate_split": "split",
    "expected_longest": "batching",
    "find_model": "models",
    "highest_rate": "search",
    "plan_memory": "memory",
    "run_fleet": "fleet",
    "smallest_fleet": "search",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
