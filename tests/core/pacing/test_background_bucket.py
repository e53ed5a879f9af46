"""What background work pays for lengthening the steps of others."""

from __future__ import annotations

import math

import pytest

from paceline.core.outputs import StepResult
from paceline.core.pacing import budget
from paceline.core.pacing.budget import BackgroundBucket
from paceline.core.pacing.view import RunningView
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.scheduler import Scheduler
from paceline.core.slo import Slo
from tests.core.pacing.models import batch, row_seconds, running, trained_on_rows
from tests.core.pacing.test_budget import budget_of
from tests.driving import Driver, make_request

# tokens of a small chunk
TILE = 32


def test_background_work_may_add_what_it_has_saved_up() -> None:
    """A step of one ordinary row takes 12 ms; a tenth of it is 1.2 ms, a chunk of 32 is 3.2 ms."""
    both = RunningView.of([running(None), batch(running(None))])
    bucket = BackgroundBucket(trained_on_rows(), 0.1, TILE)
    allowed = [bucket.seconds(both) for _ in range(5)]
    # the first is to see what a step takes without any
    assert allowed == pytest.approx([0.0, 0.0132, 0.0144, 0.0152, 0.0152], rel=0.03)
    bucket.charge(0.0050)
    allowed = [bucket.seconds(both) for _ in range(3)]
    # it was in debt by 1.8 ms, and each step pays 1.2 ms back
    assert allowed == pytest.approx([0.012, 0.0126, 0.0138], rel=0.03)
    alone = RunningView.of([batch(running(None))])
    assert bucket.seconds(alone) == math.inf
    free = BackgroundBucket(trained_on_rows(), None, TILE)
    assert free.seconds(both) == math.inf


def test_one_that_only_became_ordinary_is_no_reason_to_hold_its_like_back() -> None:
    late = running(None)
    late.aged = True
    night = batch(running(None))
    model = trained_on_rows()
    bucket = BackgroundBucket(model, 0.1, TILE)
    budget = budget_of(model, best_effort_step_s=0.030)
    alone = RunningView.of([late, night])
    assert (budget.allow(alone, 0.0).seconds, bucket.seconds(alone)) == (0.030, math.inf)
    beside = RunningView.of([late, night, running(None)])
    assert budget.allow(beside, 0.0).seconds == math.inf
    assert bucket.seconds(beside) == 0.0, "the first step beside others is without"


def test_a_row_with_many_keys_can_be_saved_up_for() -> None:
    """A step of one ordinary row takes 12 ms and earns 1.2; a row of 20,000 keys takes 10."""
    model = StepTimeModel()
    for index in range(400):
        shape = StepShape(32 * (index % 5), 0.0, 1 + index % 9, 2_500 * (index % 11))
        model.observe(shape, row_seconds(shape) + 4e-7 * shape.narrow_keys)
    night = batch(running(None))
    night.num_computed_tokens = 20_000
    bucket = BackgroundBucket(model, 0.1, TILE)
    both = RunningView.of([running(None), night])
    allowed = [bucket.seconds(both) for _ in range(20)]
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


def steady_seconds(row_seconds: float) -> float:
    """Three background rows are in every step beside an ordinary one, until rows, which took 2 ms
    of a step's 10 and more, take ``row_seconds``: mean seconds of a step a while later."""
    model = trained_on_rows()
    # a share for which they are all in each step
    bucket = BackgroundBucket(model, 0.6, TILE)
    nights = [batch(running(None)) for _ in range(3)]
    view = RunningView.of([running(None), *nights])
    late: list[float] = []
    for step in range(1000):
        limit, shape = bucket.seconds(view), view.base
        for night in nights:
            more = shape.plus(night.num_computed_tokens, 1)
            shape = more if model.predict(more) <= limit else shape
        bucket.charge(model.predict(shape) - model.predict(view.base))
        elapsed = 0.010 + shape.narrow_rows * (0.002 if step < 200 else row_seconds)
        model.observe(shape, elapsed)
        late += [elapsed] * (step >= 800)
    return sum(late) / len(late)


def test_a_steady_load_is_left_out_now_and_then_to_see_what_it_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all steps are alike, nothing tells a dear row from a dear step."""
    assert steady_seconds(0.002) == pytest.approx(0.018, rel=0.02)
    # an ordinary row alone takes 18 ms and earns 10.8: one background row
    assert steady_seconds(0.008) == pytest.approx(0.026, rel=0.05)
    # at the start alone: they are taken to add 14 ms to 28, and all three stay
    monkeypatch.setattr(budget, "_LOOK", 10**9)
    assert steady_seconds(0.008) == pytest.approx(0.042)
