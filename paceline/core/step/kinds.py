"""Steps of one kind, for policies that do not mix: rows of one token, or longer ones."""

from __future__ import annotations

from paceline.core.request import Request
from paceline.core.step.builder import StepBuilder
from paceline.core.step.limits import StepLimits
from paceline.core.step.rows import Rows
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["choose_kind", "fill_narrow"]


def choose_kind(step: StepBuilder, limits: StepLimits, state: SchedulerState, held: bool) -> None:
    """Wide rows while there are any to compute, or a waiting request that would bring some."""
    running = state.running.requests
    step.wide = any(request.num_uncomputed_tokens > 1 for request in running)
    if not step.wide and not held:
        head = state.waiting.first(pressing=limits.pressing)
        step.wide = not running or (
            head is not None
            and len(running) < state.config.max_num_seqs
            and state.kv.shortfall(head, beside_others=True) == 0
        )
    step.narrow = not step.wide


def fill_narrow(
    step: StepBuilder, limits: StepLimits, running: list[Request], rows: Rows, now: float
) -> None:
    """No wide row could be had after all (memory): do not waste the step."""
    step.narrow = True
    best_effort = sum(request.best_effort for request in running)
    ordinary = [request for request in running if request.tier is Tier.ORDINARY]
    rows.extend(step, limits, ordinary, best_effort, now, limited=False)
    rest = [request for request in running if request.best_effort]
    rows.extend(step, limits, rest, 0, now, limited=True)
