"""Searches find the edge of what they are given, in few runs; splits balance by hand."""

from __future__ import annotations

import math

import pytest

from paceline.core.outputs import SchedulerOutput
from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival, Served
from paceline.sim.plan.search import Target, highest_rate, smallest_fleet
from paceline.sim.plan.split import estimate_split
from paceline.sim.report.metrics import Metrics, Summary


def run_with(attainment: float) -> Summary:
    """A run of 1000 requests of which that share is met."""
    metrics = Metrics()
    for index in range(1000):
        late = 2.0 if index >= attainment * 1000 else 0.5
        arrival = Arrival(0.0, 1, 1, ttft=1.0)
        metrics.add(Served(arrival, 0, 0.0, late, late, 1, 0, 0))
    return metrics.summary()


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 9, 31, 64])
def test_smallest_fleet(needed: int) -> None:
    sizes: list[int] = []

    def run(size: int) -> Summary:
        sizes.append(size)
        return run_with(min(1.0, 0.99 * size / needed))

    found = smallest_fleet(run, Target(0.99), most=64)
    assert found.size == needed
    assert found.best.attainment >= 0.99
    assert len(sizes) == len(set(sizes)) == len(found.tried) <= 2 * math.log2(needed) + 2


def test_no_fleet_is_large_enough() -> None:
    found = smallest_fleet(lambda size: run_with(0.01 * size), Target(0.9), most=12)
    assert found.size is None
    assert [size for size, _ in found.tried] == [1, 2, 4, 8, 12]
    assert found.best.attainment == pytest.approx(0.12)


def test_highest_rate() -> None:
    def run(rate: float) -> Summary:
        return run_with(1.0 if rate <= 7.3 else 0.5)

    found = highest_rate(run, Target(0.9), low=0.1, high=100.0, precision=0.02)
    assert found.size is not None and 7.3 / 1.02 <= found.size <= 7.3
    assert highest_rate(run, Target(0.9), low=0.1, high=5.0).size == 5.0
    assert highest_rate(run, Target(0.9), low=8.0, high=9.0).size is None


def test_wrong_searches_are_refused() -> None:
    with pytest.raises(ConfigError, match="attainment must be in"):
        Target(0.0)
    with pytest.raises(ConfigError, match="at least 1 replica"):
        smallest_fleet(lambda size: run_with(1), Target(), most=0)
    with pytest.raises(ConfigError, match="0 < low < high"):
        highest_rate(lambda rate: run_with(1), Target(), low=2, high=1)


class Linear:
    """10 ms and 0.1 ms per token of a step."""

    def seconds(self, plan: SchedulerOutput) -> float:
        return 0.010 + 0.0001 * plan.num_tokens


def split(**changes: float | None) -> object:
    values = {
        "prompt_tokens": 1000,
        "output_tokens": 101,
        "tpot": 0.015,
        "max_batch": 256,
        "max_num_batched_tokens": 2048,
        "replicas": 4,
    }
    return estimate_split(Linear(), **(values | changes))  # type: ignore[arg-type]


def test_split_by_hand() -> None:
    estimate = estimate_split(
        Linear(),
        prompt_tokens=1000,
        output_tokens=101,
        tpot=0.015,
        max_batch=256,
        max_num_batched_tokens=2048,
        replicas=4,
    )
    # a prompt takes 110 ms; 50 sequences take 15 ms a step, 100 steps each
    assert estimate.prefill_rate == pytest.approx(1 / 0.110)
    assert (estimate.decode_batch, estimate.decode_seconds) == (50, pytest.approx(0.015))
    assert estimate.decode_rate == pytest.approx(50 / 1.5)
    assert estimate.ratio == pytest.approx(33.33 / 9.09, rel=0.001)
    assert estimate.best == (3, 1)
    assert estimate.split_rate == pytest.approx(3 / 0.110)
    assert estimate.split_rate < estimate.colocated_rate == pytest.approx(4 / (0.110 + 0.03))


def test_what_a_split_depends_on() -> None:
    base = split()
    for changes in (
        {"prompt_tokens": 500},
        {"output_tokens": 500},
        {"tpot": 0.02},
        {"max_batch": 20},
        {"max_num_batched_tokens": 100},
        {"replicas": 8},
    ):
        assert split(**changes) != base, changes
    assert split(tpot=None).decode_batch == 256  # type: ignore[attr-defined]


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes 10\.10 ms a token, more than the target of 9 ms"):
        split(tpot=0.009)
    with pytest.raises(ConfigError, match="at least 2 replicas, got 1"):
        split(replicas=1)
    with pytest.raises(ConfigError, match="max_batch must be at least 1, got 0"):
        split(max_batch=0)
