"""What goes on from an engine to the one that replaces it, and what does not."""

from __future__ import annotations

from dataclasses import fields

from paceline.core.stats import SchedulerStats
from paceline.engine.supervision.supervised import COUNTERS, added
from paceline.engine.types import EngineStats

# how things are now; everything else in a snapshot goes on from scheduler to scheduler
MOMENTARY = {
    "num_running", "num_waiting", "num_waiting_capacity", "num_waiting_deferred", "num_blocks",
    "num_free_blocks", "pressure_level", "num_cached_free_blocks", "num_host_blocks",
    "num_free_host_blocks", "blocked_by", "num_window_blocks", "num_free_window_blocks",
}  # fmt: skip


def test_what_is_not_of_the_moment_counts() -> None:
    assert {entry.name for entry in fields(SchedulerStats)} - MOMENTARY == set(COUNTERS)


def test_counters_go_on_and_the_rest_is_as_it_is() -> None:
    before = SchedulerStats(
        num_running=3, num_preemptions=2, refused=(("queue-full", 1), ("pressure", 2))
    )
    now = SchedulerStats(
        num_running=1, num_preemptions=1, refused=(("pressure", 3),), actual_step_seconds=0.25
    )
    both = added(
        EngineStats(time=5.0, num_steps=7, scheduler=before),
        EngineStats(time=9.0, num_steps=2, scheduler=now),
    )
    assert (both.time, both.num_steps) == (9.0, 9)
    assert both.scheduler == SchedulerStats(
        num_running=1,
        num_preemptions=3,
        refused=(("queue-full", 1), ("pressure", 5)),
        actual_step_seconds=0.25,
    )
