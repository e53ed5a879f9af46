"""Leaving out the fewest: Moore and Hodgson against brute force, and in the scheduler."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.pacing.waiting_targets import triage
from paceline.core.request import Request
from paceline.core.slo import Slo
from tests.driving import Driver, make_request


def jobs(pairs: list[tuple[int, int]]) -> list[Request]:
    """Requests of (work, due), in order of due."""
    made = [
        make_request(f"r{i}", work, slo=Slo(ttft=float(due))) for i, (work, due) in enumerate(pairs)
    ]
    return sorted(made, key=lambda r: r.targets.ttft or 0.0)


def on_time(requests: list[Request]) -> bool:
    end = 0
    for request in requests:
        end += request.num_prompt_tokens
        if end > (request.targets.ttft or 0.0):
            return False
    return True


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), max_size=8))
def test_it_leaves_out_as_few_as_possible(pairs: list[tuple[int, int]]) -> None:
    requests = jobs(pairs)
    left_out = triage(
        requests,
        0.0,
        [float(request.num_prompt_tokens) for request in requests],
        [request.targets.ttft or 0.0 for request in requests],
    )
    kept = [request for request in requests if request not in left_out]
    assert on_time(kept)
    best = max(
        size
        for size in range(len(requests) + 1)
        for chosen in combinations(requests, size)
        if on_time(list(chosen))
    )
    assert len(kept) == best


def test_a_burst_costs_its_largest_and_not_everybody() -> None:
    driver = Driver(
        seconds=lambda shape: 0.5 + 0.1 * shape.wide_tokens,
        num_blocks=2000,
        max_num_seqs=64,
        max_num_batched_tokens=64,
        policy="deadline",
        enable_prefix_caching=False,
    )
    for index in range(20):
        driver.add(make_request(f"warm{index}", 5 + index, 2))
        driver.run()
    # about 0.1 s a token, and 1 s of the driver's clock a step: 3 of the large ones, or all others
    sizes = [60] * 4 + [10] * 12
    for index, size in enumerate(sizes):
        prompt = range(100 * index, 100 * index + size)
        driver.add(make_request(f"r{index}", prompt, 2, arrival=driver.now, slo=Slo(ttft=20.0)))
    driver.run()
    timelines = [driver.finished[f"r{i}"].timeline for i in range(len(sizes))]
    demoted = [i for i, timeline in enumerate(timelines) if timeline and timeline.demoted]
    assert demoted, "not all could be on time"
    assert all(sizes[index] == 60 for index in demoted)
    assert len(driver.finished) == 20 + len(sizes), "left out is not lost"
