"""What the live part of ``make bench NAME=vllm`` counts."""

from __future__ import annotations

from benchmarks.common.client import Timing
from benchmarks.vllm.live import Work, figures, requests_at

WORK = Work(vocabulary=1_000, short=(4, 8), long=(20, 30), outputs=(3, 3), ttft=(1.0, 5.0))


def test_requests_are_the_same_for_everybody() -> None:
    plan = requests_at(20.0, 10.0, WORK, seed=3)
    assert plan == requests_at(20.0, 10.0, WORK, seed=3) != requests_at(20.0, 10.0, WORK, seed=4)
    longer = requests_at(20.0, 30.0, WORK, seed=3)
    assert longer[: len(plan)] == plan, "the sustained rate begins with the same arrivals"
    assert 150 < len(plan) < 250 and all(0.0 < request.at < 10.0 for request in plan)
    long = [request for request in plan if len(request.prompt) >= 20]
    assert 0.05 < len(long) / len(plan) < 0.3
    assert {WORK.ttft_of(request) for request in long} == {5.0}


def test_kept_are_complete_and_within_both_targets() -> None:
    plan = requests_at(20.0, 10.0, WORK, seed=3)
    short = next(request for request in plan if len(request.prompt) <= 8)
    long = next(request for request in plan if len(request.prompt) >= 20)
    quick, late = Timing(0.0, (0.9, 1.0, 1.05), 3), Timing(0.0, (1.5, 1.6, 1.65), 3)
    slow, refused = Timing(0.0, (0.5, 0.8, 1.2), 3), Timing(0.0, (), 0, "status 429")
    found = figures(
        [short, short, long, short, short], [quick, late, late, slow, refused], WORK, 2.0
    )
    # the quick one, and the late one whose prompt is long
    assert (found["kept"], found["requests"], found["complete"]) == (0.4, 5, 4)
    assert found["tokens_per_s"] == 6.0
