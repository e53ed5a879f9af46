"""Statistics of a scheduler.

A ``SchedulerStats`` is embedded unchanged in what an engine sends, so metrics can read every field
declared here. This module does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["SchedulerStats"]


def _counter(default: Any = 0) -> Any:
    """Declare a number, or numbers by name, that counts from the start and never falls."""
    return field(default=default, metadata={"counts": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot of the scheduler, cheap enough to take every step. Fields that are not a
    ``_counter`` are current values."""

    num_running: int = 0
    num_waiting: int = 0
    # waiting for capacity: a slot, memory, tokens of a step
    num_waiting_capacity: int = 0
    # waiting for an event (a fork's parent)
    num_waiting_deferred: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = _counter()
    # rows with drafts, the draft tokens, and the draft tokens that were right
    num_drafts: int = _counter()
    num_draft_tokens: int = _counter()
    num_accepted_tokens: int = _counter()
    # the last two by source, and right draft tokens by their index in the row, from the first on
    drafted: tuple[tuple[str, int], ...] = _counter(())
    accepted: tuple[tuple[str, int], ...] = _counter(())
    accepted_by_place: tuple[tuple[str, int], ...] = _counter(())
    prefix_cache_queries: int = _counter()
    prefix_cache_hits: int = _counter()
    num_recomputed_tokens: int = _counter()
    num_swapped_out_blocks: int = _counter()
    num_swapped_in_blocks: int = _counter()
    num_demoted: int = _counter()
    # tokens that were computed for requests that were aborted or failed
    num_discarded_tokens: int = _counter()
    # refused requests by QueueFullError.reason
    refused: tuple[tuple[str, int], ...] = _counter(())
    # seconds the queue's head was blocked, by reason
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
    # blocks of layers with a sliding window, if these have blocks of their own
    num_window_blocks: int = 0
    num_free_window_blocks: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    # why the head of the queue is blocked, a name of ``queues.wait_clocks``; None: it is not
    blocked_by: str | None = None
