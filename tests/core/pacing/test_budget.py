"""The adaptive budget: the largest chunk that keeps every running request on time."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from paceline.core.outputs import StepResult
from paceline.core.pacing.budget import AdaptiveTokenBudget, Allowance
from paceline.core.pacing.view import Survey
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request, RequestStatus
from paceline.core.scheduler import Scheduler
from paceline.core.slo import Slo
from paceline.core.step.builder import Draft
from tests.driving import Driver, ask, make_request


def seconds(shape: StepShape) -> float:
    """10 ms a step and 0.1 ms a prompt token."""
    return 0.010 + 1e-4 * shape.wide_tokens


def trained() -> StepTimeModel:
    model = StepTimeModel()
    for index in range(200):
        shape = StepShape().plus(10 + index % 7, 1)
        if index % 2:
            shape = shape.plus(0, 32 * (1 + index % 16))
        model.observe(shape, seconds(shape))
    return model


def budget_of(model: StepTimeModel, **options: Any) -> AdaptiveTokenBudget:
    work = WorkEstimator(model, LengthHistory())
    return AdaptiveTokenBudget(model, 512, work=work, **({"best_effort_step_s": 0.05} | options))


def running(tpot: float | None, first_token: float = 0.0, num_output: int = 1) -> Request:
    request = make_request("r", 10, 500, slo=Slo(tpot=tpot))
    request.status = RequestStatus.RUNNING
    for _ in range(num_output):
        request.append_output(1)
    request.num_computed_tokens = request.num_tokens - 1
    request.first_token_time = first_token
    return request


def test_without_targets_it_is_a_fixed_budget() -> None:
    budget = budget_of(trained())
    assert budget.allow(Survey.of([]), 0.0).tokens == 512
    assert budget.allow(Survey.of([running(None)]), 0.0).tokens == 512


@pytest.mark.parametrize(("tpot", "expected"), [(0.030, 161), (0.020, 65), (0.050, 321)])
def test_the_chunk_fits_the_slack(tpot: float, expected: int) -> None:
    budget = budget_of(trained())
    # next token due at 0.9 * tpot: (that - 10 ms) / 0.1 ms tokens, tile-aligned, + 1 running
    assert budget.allow(Survey.of([running(tpot)]), 0.0).tokens == expected


def test_a_request_ahead_of_schedule_lends_its_slack() -> None:
    budget = budget_of(trained())
    on_time, ahead = running(0.020, num_output=1), running(0.020, num_output=3)
    assert budget.allow(Survey.of([on_time]), 0.0).tokens == 65
    assert budget.allow(Survey.of([ahead]), 0.0).tokens == 417


def test_the_tightest_request_decides() -> None:
    budget = budget_of(trained())
    assert budget.allow(Survey.of([running(0.050), running(0.020)]), 0.0).tokens == 2 + 64


def test_late_requests_leave_the_floor_so_prompts_never_starve() -> None:
    budget = budget_of(trained(), floor=64)
    assert budget.allow(Survey.of([running(0.020)]), now=4.0).tokens == 1 + 64


def test_a_request_behind_catches_up_while_it_lasts() -> None:
    """Half a second late with 499 tokens of 18 ms to go: 1 ms a token does it."""
    assert budget_of(trained()).allow(Survey.of([running(0.030)]), now=0.5).tokens == 129
    assert budget_of(trained()).allow(Survey.of([running(0.030)]), now=2.5).tokens == 97


def test_a_request_too_late_to_catch_up_is_paced_from_now_on() -> None:
    """9 s late with at most 499 tokens of 20 ms to go: prompts need not suffer for that."""
    assert budget_of(trained()).allow(Survey.of([running(0.020)]), now=9.0).tokens == 65


def test_of_all_who_are_paced_few_are_asked_what_time_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(5)
    asked = []
    spare = AdaptiveTokenBudget._spare
    monkeypatch.setattr(
        AdaptiveTokenBudget, "_spare", lambda *args: asked.append(0) or spare(*args)
    )
    for now in (0.1, 1.0, 2.5, 9.0):
        budget = budget_of(trained())
        paced = [
            running(rng.choice((0.02, 0.05, 0.3)), rng.uniform(0.0, now), rng.randint(1, 60))
            for _ in range(200)
        ]
        least = min(spare(budget, request, now) for request in paced)
        assert budget._least_spare(paced, now) == least
    budget = budget_of(trained())
    assert budget._least_spare([], 0.0) == math.inf
    # those who came last are the least ahead
    streams = [running(0.05, 0.02 * index, 200 - index) for index in range(200)]
    asked.clear()
    budget.allow(Survey.of(streams), 3.9)
    assert len(asked) == 1


def test_steps_are_no_larger_than_it_takes_to_be_efficient() -> None:
    """10 ms are 3 % of a step of 3,233 tokens, and 25 % of one of 300."""
    assert budget_of(trained(), overhead=0.03).allow(Survey.of([]), 0.0).tokens == 512
    assert budget_of(trained(), overhead=0.25).allow(Survey.of([]), 0.0).tokens == 320
    assert budget_of(trained(), overhead=0.25).allow(Survey.of([running(None)]), 0.0).tokens == 321


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
    streams = Survey.of([running(None) for _ in range(5)])
    sizes = [budget.allow(streams, 0.0).tokens for _ in range(48)]
    # to go on knowing: a step with twice the chunk, and one with half
    around = sorted((size - 5) / (free - 5) for size in sizes if size != free)
    assert around == pytest.approx([0.5, 0.5, 2.0, 2.0], abs=0.01)
    waits = budget.seconds_per_token(streams)
    assert waits == pytest.approx(model.predict(streams.base.plus(0, free - 5)) / (free - 5))


def test_what_has_no_streams_beside_it_or_has_rules_of_its_own_is_as_before() -> None:
    budget = budget_of(trained_where_tokens_hide())
    assert [budget.allow(Survey.of([]), 0.0).tokens for _ in range(48)] == [512] * 48
    paced = Survey.of([running(0.030)])
    assert {budget.allow(paced, 0.0).tokens for _ in range(48)} == {512}
    shared = Survey.of([running(None)])
    shared.shared = True
    assert len({budget.allow(shared, 0.0).tokens for _ in range(48)}) == 1


def test_chunks_grow_where_prompts_would_keep_others_from_streaming() -> None:
    """30 tokens of prompts for each of a stream: 20 streams end, and can be followed, so fast."""
    model = trained_where_tokens_hide(wide=600)
    assert model.wide_per_narrow == pytest.approx(30, rel=0.1)
    streams = Survey.of([running(None) for _ in range(20)])
    chunk = budget_of(model).allow(streams, 0.0).tokens - 20
    assert chunk == int(0.7 * 20 * model.wide_per_narrow) > model.free_tokens


def batch(request: Request) -> Request:
    ask(request, slo=Slo(best_effort=True))
    return request


def test_best_effort_alone_runs_in_short_steps() -> None:
    """10 ms and 0.1 ms a token: 30 ms are 192 tokens."""
    budget = budget_of(trained(), best_effort_step_s=0.030)
    assert budget.allow(Survey.of([batch(running(None))]), 0.0) == (1 + 192, 0.030, math.inf)
    assert budget.allow(Survey.of([batch(running(None)), running(None)]), 0.0).tokens == 512


def row_seconds(shape: StepShape) -> float:
    """10 ms a step, 0.1 ms a prompt token and 2 ms a row."""
    return seconds(shape) + 2e-3 * shape.narrow_rows


def trained_on_rows() -> StepTimeModel:
    model = StepTimeModel()
    for index in range(400):
        shape = StepShape(32 * (index % 5), 0.0, 1 + index % 9, 100)
        model.observe(shape, row_seconds(shape))
    return model


def test_best_effort_alone_shares_steps_that_are_long_anyway() -> None:
    """A row alone takes 12 ms: a limit below twice that would leave the rest of it unused."""
    budget = budget_of(trained_on_rows(), best_effort_step_s=0.005)
    alone = Survey.of([batch(running(None))])
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
    budget = budget_of(trained_on_rows(), shared_overhead=0.01)
    survey = Survey.of([running(tpot) for _ in range(rows)])
    assert budget.allow(survey, 0.0).tokens == 512, "as much as fits"
    survey.shared = True
    chunk = budget.allow(survey, 0.0).tokens - rows
    assert chunk == pytest.approx((seconds - 0.010 - 0.002 * rows) / 1e-4, abs=40)


def test_a_tight_pace_is_kept_among_tenants_too() -> None:
    budget = budget_of(trained())
    survey = Survey.of([running(0.030)])
    survey.shared = True
    assert budget.allow(survey, 0.0).tokens == 161


def test_background_work_may_add_what_it_has_saved_up() -> None:
    """A step of one ordinary row takes 12 ms; a tenth of it is 1.2 ms, a chunk of 32 is 3.2 ms."""
    both = Survey.of([running(None), batch(running(None))])
    budget = budget_of(trained_on_rows(), background_share=0.1)
    allowed = [budget.allow(both, 0.0).background for _ in range(5)]
    # the first is to see what a step takes without any
    assert allowed == pytest.approx([0.0, 0.0132, 0.0144, 0.0152, 0.0152], rel=0.03)
    budget.charge(0.0050)
    allowed = [budget.allow(both, 0.0).background for _ in range(3)]
    # it was in debt by 1.8 ms, and each step pays 1.2 ms back
    assert allowed == pytest.approx([0.012, 0.0126, 0.0138], rel=0.03)
    alone = Survey.of([batch(running(None))])
    assert budget.allow(alone, 0.0).background == math.inf
    free = budget_of(trained_on_rows())
    assert free.allow(both, 0.0).background == math.inf


def test_one_that_only_became_ordinary_is_no_reason_to_hold_its_like_back() -> None:
    late = running(None)
    late.aged = True
    night = batch(running(None))
    budget = budget_of(trained_on_rows(), background_share=0.1, best_effort_step_s=0.030)
    alone = budget.allow(Survey.of([late, night]), 0.0)
    assert (alone.seconds, alone.background) == (0.030, math.inf)
    beside = budget.allow(Survey.of([late, night, running(None)]), 0.0)
    assert beside.seconds == math.inf
    assert beside.background == 0.0, "the first step beside others is without"


def test_whoever_saves_up_has_the_longer_patience_in_every_kind_of_step() -> None:
    model, night = trained_on_rows(), batch(running(None))
    # a step for a prompt with a target, one without background work, and one that leaves it little
    for allowance in (Allowance(64, 0.0, 0.02), Allowance(64, 9.0, 0.0), Allowance(64, 9.0, 1e-3)):
        given = []
        for step in range(65):
            draft = Draft(allowance)
            draft.add(make_request("prompt", 8), 8, ())
            if draft.spares(night, model):
                given.append(step)
        assert given == [64]


def test_a_row_with_many_keys_can_be_saved_up_for() -> None:
    """A step of one ordinary row takes 12 ms and earns 1.2; a row of 20,000 keys takes 10."""
    model = StepTimeModel()
    for index in range(400):
        shape = StepShape(32 * (index % 5), 0.0, 1 + index % 9, 2_500 * (index % 11))
        model.observe(shape, row_seconds(shape) + 4e-7 * shape.narrow_keys)
    night = batch(running(None))
    night.num_computed_tokens = 20_000
    budget = budget_of(model, background_share=0.1)
    both = Survey.of([running(None), night])
    allowed = [budget.allow(both, 0.0).background for _ in range(20)]
    assert allowed[5] < 0.019
    assert allowed[-1] == pytest.approx(0.022, rel=0.03)
    assert allowed[-1] == pytest.approx(allowed[-2]), "no more than that is saved"


def mean_gap(slo: Slo, share: float | None) -> tuple[float, int]:
    """One ordinary request decodes among twenty best-effort ones that have their prompts: mean
    seconds of its steps, and the tokens that the others got meanwhile."""
    driver = Driver(
        max_num_batched_tokens=512,
        num_blocks=4000,
        adaptive_token_budget=True,
        max_num_seqs=32,
        background_share=share,
    )
    scheduler: Scheduler = driver.scheduler
    for index in range(20):
        first = 1000 * index
        scheduler.add_request(make_request(f"b{index}", range(first, first + 40), 900, slo=slo))
    now, began, others = 0.0, 0.0, 0
    for step in range(800):
        if step == 200:
            scheduler.add_request(make_request("ordinary", range(5), 900, arrival=now))
        if step == 500:
            # the model has learnt what a row takes
            began, others = now, 0
        plan = scheduler.schedule(now)
        elapsed = row_seconds(StepShape.of(plan.rows))
        now += elapsed
        tokens = driver.backend.execute(plan).result().sampled
        scheduler.update(plan, StepResult(plan.step_id, tokens, elapsed=elapsed), now)
        ids = [row.request_id for row in plan.rows]
        others += len(ids) - 1
        assert step <= 201 or "ordinary" in ids, "it has a row in every step"
    return (now - began) / 300, others


def test_background_work_lengthens_steps_by_its_share() -> None:
    alone = 0.012
    free, most = mean_gap(Slo(best_effort=True), None)
    assert free > 4 * alone and most > 290 * 20
    for share in (0.1, 0.5):
        gap, others = mean_gap(Slo(best_effort=True), share)
        assert gap == pytest.approx((1 + share) * alone, rel=0.05)
        # a row is 2 ms: it is used to the full
        assert others == pytest.approx(300 * share * alone / 0.002, rel=0.1)


def test_best_effort_with_a_deadline_takes_what_is_left() -> None:
    slo = Slo(best_effort=True, deadline=600.0)
    assert mean_gap(slo, 0.1) == mean_gap(slo, None)


def test_a_prompt_with_a_target_keeps_best_effort_rows_out() -> None:
    prompt = make_request("p", 300, slo=Slo(ttft=1.0))
    assert budget_of(trained()).allow(Survey.of([prompt, batch(running(None))]), 0.0).seconds == 0.0
    patient = make_request("p", 300)
    assert budget_of(trained()).allow(Survey.of([patient, batch(running(None))]), 0.0).seconds > 1.0


def test_an_untrained_model_is_not_trusted() -> None:
    assert budget_of(StepTimeModel()).allow(Survey.of([running(0.011)]), 0.0).tokens == 512


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
