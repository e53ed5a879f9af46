"""The adaptive budget: the largest chunk that keeps every running request on time."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.outputs import StepResult
from paceline.core.pacing.budget import StepBudget
from paceline.core.pacing.view import RunningView
from paceline.core.predict.chunk import ChunkSize
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.scheduler import Scheduler
from paceline.core.slo import Slo
from tests.core.pacing.models import batch, running, seconds, trained, trained_on_rows
from tests.driving import Driver, ask, make_request


def budget_of(
    model: StepTimeModel,
    *,
    best_effort_step_s: float = 0.05,
    floor: int = 32,
    overhead: float = 0.03,
) -> StepBudget:
    chunk = ChunkSize(model, 512, floor=floor, overhead=overhead)
    work = WorkEstimator(model, LengthHistory())
    config = SchedulerConfig(best_effort_step_s=best_effort_step_s)
    return StepBudget(model, chunk, work, config)


def test_without_targets_it_is_a_fixed_budget() -> None:
    budget = budget_of(trained())
    assert budget.allow(RunningView.of([]), 0.0).tokens == 512
    assert budget.allow(RunningView.of([running(None)]), 0.0).tokens == 512


@pytest.mark.parametrize(("tpot", "expected"), [(0.030, 161), (0.020, 65), (0.050, 321)])
def test_the_chunk_fits_the_slack(tpot: float, expected: int) -> None:
    budget = budget_of(trained())
    # next token due at 0.9 * tpot: (that - 10 ms) / 0.1 ms tokens, tile-aligned, + 1 running
    assert budget.allow(RunningView.of([running(tpot)]), 0.0).tokens == expected


def test_a_request_ahead_of_schedule_lends_its_slack() -> None:
    budget = budget_of(trained())
    on_time, ahead = running(0.020, num_output=1), running(0.020, num_output=3)
    assert budget.allow(RunningView.of([on_time]), 0.0).tokens == 65
    assert budget.allow(RunningView.of([ahead]), 0.0).tokens == 417


def test_the_tightest_request_decides() -> None:
    budget = budget_of(trained())
    assert budget.allow(RunningView.of([running(0.050), running(0.020)]), 0.0).tokens == 2 + 64


def test_late_requests_leave_the_floor_so_prompts_never_starve() -> None:
    budget = budget_of(trained(), floor=64)
    assert budget.allow(RunningView.of([running(0.020)]), now=4.0).tokens == 1 + 64


def test_a_request_behind_catches_up_while_it_lasts() -> None:
    """Half a second late with 499 tokens of 30 ms to go: 1 ms a token does it."""
    assert budget_of(trained()).allow(RunningView.of([running(0.030)]), now=0.5).tokens == 161
    assert budget_of(trained()).allow(RunningView.of([running(0.030)]), now=2.5).tokens == 129


def test_a_request_gets_ahead_by_one_token_and_no_more() -> None:
    """27 of 30 ms a token for the first ten, then 30: as it keeps to that, it has so long for each
    step, and no longer."""

    def seconds(done: int, now: float) -> float:
        view = RunningView.of([running(0.030, num_output=done)])
        return budget_of(trained()).allow(view, now).seconds

    assert seconds(1, 0.0) == pytest.approx(0.027)
    assert seconds(10, 9 * 0.027) == pytest.approx(0.027)
    assert seconds(11, 10 * 0.027) == pytest.approx(0.030)
    assert seconds(100, 98 * 0.030) == pytest.approx(0.030)


def test_a_request_too_late_to_catch_up_is_paced_from_now_on() -> None:
    """9 s late with at most 499 tokens of 20 ms to go: prompts need not suffer for that."""
    assert budget_of(trained()).allow(RunningView.of([running(0.020)]), now=9.0).tokens == 65


@pytest.mark.parametrize(("to_come", "late"), [(1, 1.5), (25, 1.1), (499, 1.0224)])
def test_steps_that_vary_are_shorter_by_the_mean_of_those_to_come(
    monkeypatch: pytest.MonkeyPatch, to_come: int, late: float
) -> None:
    """One step in ten takes 1.5 times as long as predicted."""
    monkeypatch.setattr(StepTimeModel, "quantile", lambda self, q: 1.5)
    request = running(0.050)
    ask(request, sampling=replace(request.asked.sampling, max_tokens=1 + to_come))
    found = budget_of(trained()).allow(RunningView.of([request]), 0.0)
    assert found.seconds == pytest.approx(0.045 / late, rel=1e-4)


def test_of_all_who_are_paced_few_are_asked_what_time_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(5)
    asked = []
    output_tokens = WorkEstimator.output_tokens
    monkeypatch.setattr(
        WorkEstimator, "output_tokens", lambda *args: asked.append(0) or output_tokens(*args)
    )
    for now in (0.1, 1.0, 2.5, 9.0):
        budget = budget_of(trained())
        paced = [
            running(rng.choice((0.02, 0.05, 0.3)), rng.uniform(0.0, now), rng.randint(1, 60))
            for _ in range(200)
        ]
        least = min(budget._least_spare([request], now, 1.0) for request in paced)
        assert budget._least_spare(paced, now, 1.0) == least
    budget = budget_of(trained())
    assert budget._least_spare([], 0.0, 1.0) == math.inf
    # those who came last are the least ahead, and two of them are behind; the one with the least
    # time is asked once more, as its steps vary
    streams = [running(0.05, 0.02 * index, 200 - index) for index in range(200)]
    asked.clear()
    budget.allow(RunningView.of(streams), 4.02)
    assert len(asked) == 3


def test_steps_are_no_larger_than_it_takes_to_be_efficient() -> None:
    """10 ms are 3 % of a step of 3,233 tokens, and 25 % of one of 300."""
    assert budget_of(trained(), overhead=0.03).allow(RunningView.of([]), 0.0).tokens == 512
    assert budget_of(trained(), overhead=0.25).allow(RunningView.of([]), 0.0).tokens == 320
    beside = RunningView.of([running(None)])
    assert budget_of(trained(), overhead=0.25).allow(beside, 0.0).tokens == 321


def trained_where_tokens_hide(wide: int = 300) -> StepTimeModel:
    """1 ms a step, and the longer of 6 ms and 30 us a token; of two steps with streams one has
    ``wide`` tokens of a prompt, more or less."""
    model = StepTimeModel()
    for index in range(800):
        shape = StepShape(index % 2 * wide * (1 + index % 5) // 3, 0.0, 8 + index % 5, 100)
        tokens = shape.wide_tokens + shape.narrow_rows
        model.observe(shape, 0.001 + max(0.006, 3e-5 * tokens))
    assert model.free_tokens in (192, 224)
    return model


def test_beside_streams_a_step_is_as_large_as_costs_nothing() -> None:
    model = trained_where_tokens_hide()
    budget, free = budget_of(model), model.free_tokens
    streams = RunningView.of([running(None) for _ in range(5)])
    sizes = [budget.allow(streams, 0.0).tokens for _ in range(48)]
    # to go on knowing: a step with twice the chunk, and one with half
    around = sorted((size - 5) / (free - 5) for size in sizes if size != free)
    assert around == pytest.approx([0.5, 0.5, 2.0, 2.0], abs=0.01)
    waits = budget.seconds_per_token(streams)
    assert waits == pytest.approx(model.predict(streams.base.plus(0, free - 5)) / (free - 5))


def test_what_has_no_streams_beside_it_or_has_rules_of_its_own_is_as_before() -> None:
    budget = budget_of(trained_where_tokens_hide())
    assert [budget.allow(RunningView.of([]), 0.0).tokens for _ in range(48)] == [512] * 48
    paced = RunningView.of([running(0.030)])
    assert {budget.allow(paced, 0.0).tokens for _ in range(48)} == {512}
    shared = replace(RunningView.of([running(None)]), step_rows=3.0)
    assert len({budget.allow(shared, 0.0).tokens for _ in range(48)}) == 1


def test_best_effort_alone_runs_in_short_steps() -> None:
    """10 ms and 0.1 ms a token: 30 ms are 192 tokens."""
    budget = budget_of(trained(), best_effort_step_s=0.030)
    assert budget.allow(RunningView.of([batch(running(None))]), 0.0)[:2] == (1 + 192, 0.030)
    assert budget.allow(RunningView.of([batch(running(None)), running(None)]), 0.0).tokens == 512


def test_best_effort_alone_shares_steps_that_are_long_anyway() -> None:
    """A row alone takes 12 ms: a limit below twice that would leave the rest of it unused."""
    budget = budget_of(trained_on_rows(), best_effort_step_s=0.005)
    alone = RunningView.of([batch(running(None))])
    assert budget.best_effort_seconds == pytest.approx(0.024, rel=0.03)
    assert budget.allow(alone, 0.0).seconds == budget.best_effort_seconds
    roomy = budget_of(trained_on_rows(), best_effort_step_s=0.050)
    assert roomy.best_effort_seconds == 0.050


@pytest.mark.parametrize(
    # rows take 10 ms and 2 ms each
    ("rows", "seconds"),
    [(0, 0.05), (1, 0.05), (6, 0.066)],
)
@pytest.mark.parametrize("tpot", [None, 10.0])
def test_steps_are_short_while_tenants_share_the_engine(
    rows: int, seconds: float, tpot: float | None
) -> None:
    """Whoever comes waits no longer than for a step of best effort, or for three times the rows."""
    budget = budget_of(trained_on_rows())
    view = RunningView.of([running(tpot) for _ in range(rows)])
    assert budget.allow(view, 0.0).tokens == 512, "as much as fits"
    chunk = budget.allow(replace(view, step_rows=3.0), 0.0).tokens - rows
    assert chunk == pytest.approx((seconds - 0.010 - 0.002 * rows) / 1e-4, abs=40)


def test_a_tight_pace_is_kept_among_tenants_too() -> None:
    budget = budget_of(trained())
    view = replace(RunningView.of([running(0.030)]), step_rows=3.0)
    assert budget.allow(view, 0.0).tokens == 161


def test_a_prompt_with_a_target_keeps_best_effort_rows_out() -> None:
    prompt = make_request("p", 300, slo=Slo(ttft=1.0))
    view = RunningView.of([prompt, batch(running(None))])
    assert budget_of(trained()).allow(view, 0.0).seconds == 0.0
    patient = make_request("p", 300)
    view = RunningView.of([patient, batch(running(None))])
    assert budget_of(trained()).allow(view, 0.0).seconds > 1.0


def test_an_untrained_model_is_not_trusted() -> None:
    assert budget_of(StepTimeModel()).allow(RunningView.of([running(0.011)]), 0.0).tokens == 512


def longest_gap(adaptive: bool) -> float:
    """A paced request decodes while prompts keep arriving; steps take what ``seconds`` says."""
    driver = Driver(
        max_num_batched_tokens=512, num_blocks=4000, adaptive_token_budget=adaptive, max_num_seqs=32
    )
    scheduler: Scheduler = driver.scheduler
    scheduler.add_request(make_request("paced", 10, 300, slo=Slo(tpot=0.040)))
    now = 0.0
    times: list[float] = []
    for index in range(300):
        if index % 5 == 0:
            first = 1000 * index
            scheduler.add_request(
                make_request(f"p{index}", range(first, first + 400), 2, arrival=now)
            )
        plan = scheduler.schedule(now)
        elapsed = seconds(StepShape.of(plan.rows))
        now += elapsed
        tokens = driver.backend.execute(plan).result().sampled
        updates = scheduler.update(plan, StepResult(plan.step_id, tokens, elapsed=elapsed), now)
        times.extend(now for update in updates if update.request_id == "paced")
    return max(b - a for a, b in itertools.pairwise(times[30:]))


def test_prompts_stretch_a_paced_stream_only_with_a_fixed_budget() -> None:
    assert longest_gap(adaptive=False) > 0.050
    assert longest_gap(adaptive=True) <= 0.081, "one step spends the slack of at most two targets"
