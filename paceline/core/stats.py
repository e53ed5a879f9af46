"""What a scheduler tells of itself.

A ``SchedulerStats`` is embedded as it is in what an engine sends, so a field that is declared here
is there for metrics to read. This module does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["SchedulerStats"]


def _counter(default: Any = 0) -> Any:
    """A number, or numbers by name, that counts from the start and never falls."""
    return field(default=default, metadata={"counts": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot of the scheduler, cheap enough to take every step. What is no ``_counter`` is how
    things are now."""

    num_running: int = 0
    num_waiting: int = 0
    # waiting for room: a place, memory, tokens of a step
    num_waiting_capacity: int = 0
    # waiting for an event (a fork's parent)
    num_waiting_deferred: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = _counter()
    # rows with guesses, the guesses, and those that were right
    num_drafts: int = _counter()
    num_draft_tokens: int = _counter()
    num_accepted_tokens: int = _counter()
    # the last two by source, and right guesses by their place in the row, from the first on
    drafted: tuple[tuple[str, int], ...] = _counter(())
    accepted: tuple[tuple[str, int], ...] = _counter(())
    accepted_by_place: tuple[tuple[str, int], ...] = _counter(())
    prefix_cache_queries: int = _counter()
    prefix_cache_hits: int = _counter()
    num_recomputed_tokens: int = _counter()
    num_swapped_out_blocks: int = _counter()
    num_swapped_in_blocks: int = _counter()
    num_relegated: int = _counter()
    # tokens that were computed for requests that were aborted or failed
    num_discarded_tokens: int = _counter()
    # refused requests by QueueFullError.reason
    refused: tuple[tuple[str, int], ...] = _counter(())
    # seconds the queue's head was held up, by reason
    waited: tuple[tuple[str, float], ...] = _counter(())
    # how far the pressure valve is open: 0 (closed) to 4
    pressure_level: int = 0
    # predicted and measured seconds of all steps that were predicted
    predicted_step_seconds: float = _counter(0.0)
    actual_step_seconds: float = _counter(0.0)
    # tokens computed in rows of several tokens, and of one
    num_prefill_tokens: int = _counter()
    num_decode_tokens: int = _counter()
    # tokens of the prompts whose request got its first token, each counted whole in that step
    num_prompt_tokens: int = _counter()
    # free blocks that the prefix cache can still find
    num_cached_free_blocks: int = 0
    # blocks of layers with a sliding window, where these have blocks of their own
    num_window_blocks: int = 0
    num_free_window_blocks: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    # what holds the head of the queue up, a name of ``queues.wait_clocks``; None: nothing does
    held_by: str | None = None
