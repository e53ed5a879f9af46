"""Fitting a recording: known step times come back, noise is seeded, overheads are found."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.errors import ConfigError
from paceline.sim.arrival import Served
from paceline.sim.pool import Pool
from paceline.sim.recording import RecordedRequest, RecordedStep, Recording
from paceline.sim.replica import Delays, ReplicaConfig
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import StepTimes
from paceline.sim.step_times.recorded import RecordedStepTimes, fit_delays, step_intervals
from tests.sim.step_times.test_profile import plan
from tests.sim.workloads import bursty


class Tiles:
    """Kernels that compute 64 tokens as fast as one, and two tiles in twice the time."""

    def seconds(self, plan: SchedulerOutput) -> float:
        keys = sum(row.start * row.num_tokens for row in plan.rows)
        return 0.010 + 0.004 * max(1.0, plan.num_tokens / 64) + 2e-8 * keys


CONFIG = ReplicaConfig(
    scheduler=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=16, max_model_len=512),
    cache=CacheConfig(block_size=16, num_blocks=400, enable_prefix_caching=False),
    delays=Delays(inbound=0.003),
)


def record(times: StepTimes, seed: int, count: int = 120) -> tuple[Recording, list[Served]]:
    """What a server with these step times would have written."""
    steps: list[RecordedStep] = []

    def on_plan(_: int, plan: SchedulerOutput, now: float, start: float, end: float) -> None:
        wide = tuple((r.start, r.num_tokens) for r in plan.rows if r.num_tokens > 1)
        narrow = [r.start for r in plan.rows if r.num_tokens == 1]
        steps.append(
            RecordedStep(
                planned=now,
                done=end,
                seconds=end - start,
                wide=wide,
                narrow_rows=len(narrow),
                narrow_keys=sum(narrow),
                longest=max(narrow, default=0),
                samples=sum(r.samples for r in plan.rows),
            )
        )

    served: list[Served] = []
    workload = [replace(a, ttft=None, tpot=None) for a in bursty(count, seed, shared=False)]
    Simulator(Pool.single(CONFIG, times), served.append, on_plan=on_plan).run(workload)
    requests = tuple(
        RecordedRequest(
            request_id=str(number),
            arrival=s.arrival.at,
            taken=s.first_scheduled or 0.0,
            scheduled=s.first_scheduled,
            first_token=s.first_token,
            last_token=s.last_token or 0.0,
            prompt_tokens=s.arrival.prompt_tokens,
            output_tokens=s.output_tokens,
            cached_tokens=0,
            preemptions=0,
            end="length",
            slo={},
            tenant="",
            priority=0,
        )
        for number, s in enumerate(sorted(served, key=lambda s: s.arrival.at))
    )
    return Recording(CONFIG, tuple(steps), requests, 0), served


def test_known_step_times_come_back() -> None:
    recording, _ = record(Tiles(), seed=1)
    fitted = RecordedStepTimes(recording, seed=None)
    assert fitted.quality.mean_abs_error < 0.03
    for step in (plan((40, 1)), plan(*[(90, 1)] * 12), plan((0, 100)), plan((0, 30), (50, 1))):
        assert fitted.seconds(step) == pytest.approx(Tiles().seconds(step), rel=0.06)


def test_it_predicts_better_than_the_online_model() -> None:
    recording, _ = record(Tiles(), seed=1)
    fitted = RecordedStepTimes(recording, seed=None)
    other, _ = record(Tiles(), seed=2)
    online = StepTimeModel()
    for step, seconds in zip(recording.steps, step_intervals(recording.steps), strict=True):
        online.observe(shape(step), seconds)
    theirs = mean(
        abs(online.predict(shape(step)) / seconds - 1.0)
        for step, seconds in zip(other.steps, step_intervals(other.steps), strict=True)
    )
    assert fitted.judge(other).mean_abs_error < 0.5 * theirs


def shape(step: RecordedStep) -> StepShape:
    return StepShape(step.wide_tokens, step.wide_keys, step.narrow_rows, step.narrow_keys)


def test_another_run_is_predicted() -> None:
    recording, _ = record(Tiles(), seed=1)
    _, truth = record(Tiles(), seed=2)
    served: list[Served] = []
    pool = Pool.single(CONFIG, RecordedStepTimes(recording, seed=None))
    Simulator(pool, served.append).run(
        [replace(a, ttft=None, tpot=None) for a in bursty(120, 2, shared=False)]
    )
    for of in (lambda s: s.ttft, lambda s: s.e2e):
        assert mean(map(of, served)) == pytest.approx(mean(map(of, truth)), rel=0.03)


def test_noise_is_drawn_from_the_recording_and_seeded() -> None:
    recording, _ = record(Tiles(), seed=1)
    # every other step took half as long again
    rough = tuple(
        replace(s, done=s.planned + (1.5 if i % 2 else 1.0) * 0.02, planned=s.planned)
        for i, s in enumerate(recording.steps[:400:4])
    )
    noisy = replace(recording, steps=rough)
    step = plan((40, 1))
    draws = [RecordedStepTimes(noisy, seed=seed) for seed in (1, 1, 2)]
    first, again, other = ([source.seconds(step) for _ in range(50)] for source in draws)
    assert first == again != other
    assert max(first) > 1.3 * min(first)
    still = RecordedStepTimes(noisy, seed=None)
    assert still.seconds(step) == still.seconds(step)


def test_overheads() -> None:
    recording, _ = record(Tiles(), seed=1)
    delays = fit_delays(recording)
    # requests that found the engine idle were taken after the way to its inbox
    assert delays.inbound == pytest.approx(0.003)
    assert delays.loop == 0.0


def test_overlapping_steps_are_not_counted_twice() -> None:
    step = RecordedStep(0.0, 1.0, 1.0, (), 1, 10, 10, 1)
    ahead = replace(step, planned=0.0, done=1.75)
    idle = replace(step, planned=5.0, done=5.5)
    assert step_intervals([step, ahead, idle]) == [1.0, 0.75, 0.5]


def test_too_little_to_fit() -> None:
    recording, _ = record(Tiles(), seed=1, count=1)
    with pytest.raises(ConfigError, match="at least 32"):
        RecordedStepTimes(replace(recording, steps=recording.steps[:5]))
