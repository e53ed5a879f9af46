"""The last minutes, from frames: what a recorder beside the tap wrote to a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.engine.recorder import FileRecorder, Recorders
from paceline.sim.arrival import Arrival, Served
from paceline.sim.config import ReplicaConfig
from paceline.sim.minutes import recording_of, workload_of
from paceline.sim.pool import Pool
from paceline.sim.recording import Recording
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes
from paceline.sim.step_times.recorded import RecordedStepTimes, step_intervals
from paceline.sim.workload.spec import open_workload
from paceline.timeline.codec import encode, headers
from paceline.timeline.collect import Frames
from paceline.timeline.events import Done, FrameType, Plan, Told

WORKLOAD = (
    "synthetic:rate=30,cv=2,prompt=lognormal(80,1),output=lognormal(30,0.8),n=80,"
    "classes=chat(3,ttft=0.2,tpot=30ms)+batch(1,deadline=60),tenants=ada(2)+bob(1)"
)

SAME = (
    "arrival", "taken", "scheduled", "first_token", "prompt_tokens", "output_tokens",
    "cached_tokens", "preemptions", "end", "tenant", "priority",
)  # fmt: skip


def both(
    tmp_path: Path, depth: int, arrivals: Iterable[Arrival] | None = None, **cache: Any
) -> tuple[Recording, Recording, bytes]:
    """Of one simulated run: as its recorder wrote it, as its frames tell it, and these."""
    config = ReplicaConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=64, max_num_seqs=16, max_model_len=2048, policy="deadline"
        ),
        cache=CacheConfig(block_size=16, **({"num_blocks": 60} | cache)),
        pipeline_depth=depth,
    )
    path = tmp_path / "r.jsonl"
    writer = FileRecorder(path, config.scheduler, config.cache, depth)
    kept = bytearray()
    frames = Frames(config.scheduler, config.cache, kept.extend)
    simulator = Simulator(
        Pool.single(config, FixedStepTimes(0.004, 0.0001)),
        lambda served: None,
        prefix_block=16,
        recorder=lambda index, config: Recorders(writer, frames),
    )
    simulator.run(arrivals or open_workload(WORKLOAD, seed=3))
    writer.close()
    frames.close()
    return Recording.read(path), recording_of(bytes(kept), config), bytes(kept)


@pytest.mark.parametrize("depth", [1, 2])
def test_it_is_what_a_recorder_wrote(tmp_path: Path, depth: int) -> None:
    written, told, _ = both(tmp_path, depth)
    assert any(request.preemptions for request in written.requests), "or it says little"
    assert len(told.steps) == len(written.steps) > 100
    for ours, theirs in zip(told.steps, written.steps, strict=True):
        # what the backend says tells when the one before was done
        assert ours.done == pytest.approx(theirs.done, abs=1e-6)
        same = {"seconds": 0.0, "wide": (), "done": 0.0}
        assert replace(ours, **same) == replace(theirs, **same)  # type: ignore[arg-type]
        assert sorted(ours.wide) == sorted(theirs.wide)
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-5)
    ours_by_id = {request.request_id: request for request in told.requests}
    assert len(told.requests) == len(written.requests) == 80
    for theirs in written.requests:
        ours = ours_by_id[theirs.request_id]
        for name in SAME:
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name
        assert ours.slo == {name: theirs.slo[name] for name in ours.slo}
    # so it makes the same workload and the same fit
    for one, other in zip(told.workload(), written.workload(), strict=True):
        assert (one.at, one.output_tokens) == (pytest.approx(other.at), other.output_tokens)
    assert RecordedStepTimes(told, seed=None).quality.bias == pytest.approx(
        RecordedStepTimes(written, seed=None).quality.bias, abs=1e-4
    )


def test_what_was_under_way_counts_with_what_it_had(tmp_path: Path) -> None:
    written, _, frames = both(tmp_path, 1, num_blocks=4000)
    cut = recording_of(frames[: len(frames) // 2], written.config)
    whole = {request.request_id: request for request in written.requests}
    under_way = [request for request in cut.requests if not request.end]
    assert under_way
    for request in cut.requests:
        assert 0 <= request.output_tokens <= whole[request.request_id].output_tokens
    assert any(request.output_tokens for request in under_way)


def test_steps_that_are_not_told_whole_are_left_out(tmp_path: Path) -> None:
    written, told, frames = both(tmp_path, 1)
    gauges = encode(Told(FrameType.GAUGES, {"now": 1.0, "cached": 0}))
    assert recording_of(frames + gauges, written.config) == told
    # behind a gap nothing is known until a keyframe says who runs
    half = len(frames) // 2
    gap = encode(Told(FrameType.GAP, {"from": 1, "to": 2, "why": "test"}))
    at = next(end for _, _, end in headers(frames) if end >= half)
    torn = recording_of(frames[:at] + gap + frames[at:], written.config)
    assert 0 < len(torn.steps) < len(told.steps)
    rows = {(step.wide, step.narrow_rows, step.narrow_keys, step.samples) for step in told.steps}
    for step in torn.steps:
        assert (step.wide, step.narrow_rows, step.narrow_keys, step.samples) in rows
    assert recording_of(b"", written.config).requests == ()


def test_a_result_that_was_read_late_was_there_before() -> None:
    """The engine's thread was away: it found the results of two steps at once."""
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_model_len=512), cache=CacheConfig(block_size=16, num_blocks=9)
    )
    frames = bytearray(encode(Told(FrameType.START, {})))
    # (step, planned, read, seconds of the backend): planned while the one before ran
    for step, planned, done, seconds in (
        (1, 1.000, 1.010, 0.009), (2, 1.005, 1.020, 0.009), (3, 1.008, 1.0501, 0.010),
        (4, 1.015, 1.0502, 0.010), (5, 1.0501, 1.061, 0.010),
    ):  # fmt: skip
        frames += encode(
            Plan(step, planned, 0.01, math.inf, 64, 1, 9, 0, 1, 1, 0, 255, 0, False, ())
        )
        frames += encode(Done(step, done, seconds, ()))
    steps = recording_of(bytes(frames), config).steps
    assert [round(each.done, 4) for each in steps] == [1.01, 1.02, 1.0402, 1.0502, 1.061]
    assert min(step_intervals(steps)) > 0.009


def test_what_was_cached_is_cached_again(tmp_path: Path) -> None:
    """Three families of prompts, of which the frames tell lengths alone."""
    families = []
    for i in range(60):
        first, shared = 100 * (i % 3), 10 * (i % 3)
        prefix = tuple(range(first, first + shared))
        families.append(Arrival(0.4 * i, 400 + i, 5, prefix=prefix))
    written, told, _ = both(tmp_path, 2, families, num_blocks=500)
    cached = sum(request.cached_tokens for request in written.requests)
    assert cached > 5000

    def cached_of(arrivals: Iterable[Arrival]) -> int:
        found: list[Served] = []
        pool = Pool.single(told.config, FixedStepTimes(0.004, 0.0001))
        Simulator(pool, found.append, prefix_block=16).run(arrivals)
        return sum(served.cached_tokens for served in found)

    # but for the first of each length, as the families are one now
    assert 0.9 * cached <= cached_of(workload_of(told)) <= cached
    assert cached_of(told.workload()) == 0, "without it every prompt is new"
