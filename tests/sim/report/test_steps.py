"""Gaps, fullness and slices, from plans made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.sim.report.metrics import Metrics
from paceline.sim.report.steps import StepWatcher
from paceline.timeline.chrome import TimelineWriter


def plan(
    step: int, *rows: tuple[str, int, bool], released: tuple[str, ...] = ()
) -> SchedulerOutput:
    made = tuple(ScheduledRow(name, 0, tokens, (), samples) for name, tokens, samples in rows)
    return SchedulerOutput(step, made, (), (), released, sum(row.num_tokens for row in made))


def test_gaps_cross_preemptions_and_replicas() -> None:
    metrics = Metrics()
    watch = StepWatcher(metrics)
    # a prompt in two chunks: only the second samples
    watch(0, plan(0, ("a", 64, False)), 0.0, 0.0, 1.0)
    watch(0, plan(1, ("a", 8, True), ("b", 8, True)), 1.0, 1.0, 2.0)
    watch(0, plan(2, ("a", 1, True), ("b", 1, True)), 2.0, 2.0, 2.5)
    # b is preempted and comes back elsewhere 7.5 s after its last token; a goes on
    watch(0, plan(3, ("a", 1, True), released=("b",)), 2.5, 2.5, 3.0)
    watch(1, plan(0, ("b", 10, True)), 9.0, 9.0, 10.0)
    itl = metrics.summary().itl
    assert itl is not None
    assert (itl.count, itl.max) == (4, 7.5)
    assert itl.mean == pytest.approx((0.5 + 0.5 + 0.5 + 7.5) / 4)
    assert itl.p50 == pytest.approx(0.5, rel=0.01)


def test_mean_rows_are_weighed_by_time() -> None:
    watch = StepWatcher()
    assert watch.mean_rows == 0.0
    watch(0, plan(0, ("a", 1, True)), 0.0, 0.0, 3.0)
    watch(0, plan(1, ("a", 1, True), ("b", 1, True), ("c", 1, True)), 3.0, 3.0, 4.0)
    assert watch.mean_rows == pytest.approx((3 * 1 + 1 * 3) / 4)


def test_slices_say_what_a_step_computed(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    with TimelineWriter(path) as timeline:
        watch = StepWatcher(timeline=timeline)
        watch(2, plan(7, ("a", 64, False), ("b", 1, True), ("c", 1, True)), 0.5, 1.0, 1.25)
    _, event = json.loads(path.read_text())["traceEvents"]
    assert event["name"] == "1 chunks of 64 tokens, 2 single tokens"
    assert (event["tid"], event["ts"], event["dur"]) == (2, 1e6, 0.25e6)
    assert event["args"] == {
        "step": 7,
        "tokens": 66,
        "new requests": 0,
        "planned ahead ms": 500.0,
    }
