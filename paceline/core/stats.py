"""What a scheduler tells of itself: counters, and requests by SLO class.

This module does not decide anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.request import Request

__all__ = ["ClassUse", "SchedulerStats", "take_census"]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot of the scheduler, cheap enough to take every step."""

    num_running: int
    num_waiting: int
    # waiting for room: a place, memory, tokens of a step
    num_waiting_capacity: int
    # waiting for an event (a fork's parent)
    num_waiting_deferred: int
    num_blocks: int
    num_free_blocks: int
    # monotonic counters since start
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_recomputed_tokens: int
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_relegated: int = 0
    # tokens that were computed for requests that were aborted or failed
    num_discarded_tokens: int = 0
    # refused requests by QueueFullError.reason
    refused: tuple[tuple[str, int], ...] = ()
    # seconds the queue's head was held up, by reason
    waited: tuple[tuple[str, float], ...] = ()
    # of the pressure valve: 0 (closed) to 4
    pressure_level: int = 0
    # predicted and measured seconds of all steps that were predicted
    predicted_step_seconds: float = 0.0
    actual_step_seconds: float = 0.0
    # tokens computed in rows of several tokens, and of one
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    # free blocks that the prefix cache can still find
    num_cached_free_blocks: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    # what holds the head of the queue up, a name of ``queues.wait_clocks``; None: none waits
    held_by: str | None = None


class ClassUse(NamedTuple):
    """One class of requests at one moment."""

    slo_class: str
    num_running: int
    num_waiting: int
    # entries of block tables: a block that several requests share counts for each
    num_blocks: int


def take_census(running: Iterable[Request], waiting: Iterable[Request]) -> tuple[ClassUse, ...]:
    """Classes that have a request, sorted by name. Takes time in proportion to the requests, not to
    their blocks."""
    counts: dict[str, list[int]] = {}
    for place, requests in enumerate((running, waiting)):
        for request in requests:
            use = counts.setdefault(request.asked.slo.slo_class, [0, 0, 0])
            use[place] += 1
            use[2] += len(request.block_ids)
    return tuple(ClassUse(name, *counts[name]) for name in sorted(counts))
