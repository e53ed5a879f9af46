"""Fleets found by simulation: what is asked of them changes what is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.errors import ConfigError
from paceline.fleet.scaling import replicas_for
from paceline.sim.config import ReplicaConfig
from paceline.sim.plan.fleet import FleetOption, best_fleet, run_fleet, settled_size
from paceline.sim.plan.models import find_model
from paceline.sim.plan.search import Target
from paceline.sim.step_times.base import FixedStepTimes
from paceline.sim.step_times.roofline import HardwareCard
from paceline.sim.step_times.spec import Source
from paceline.sim.workload.spec import open_workload

MODEL = find_model("llama-3.1-8b")
H100 = FleetOption.of_hardware(HardwareCard.named("H100-SXM"), MODEL)
L4 = FleetOption.of_hardware(HardwareCard.named("L4"), MODEL)
BASE = "synthetic:rate=40,prompt=fixed(1500),output=uniform(5,20),n=150,classes=all(1,{})"


def test_more_load_needs_more_replicas() -> None:
    sizes = []
    for speedup in (0.5, 4):
        workload = open_workload(BASE.format("ttft=0.5") + f",speedup={speedup}")
        (answer,) = best_fleet([H100], workload, Target(0.9))
        assert answer.found.best.attainment >= 0.9
        # one less does not do
        sizes.append(int(answer.found.size or 0))
        if sizes[-1] > 1:
            assert run_fleet(H100, sizes[-1] - 1, workload).attainment < 0.9
    assert 1 <= sizes[0] < sizes[1]


def test_targets_that_no_fleet_meets_are_found_out_alone() -> None:
    """An L4 reads 16 GB of weights at 240 GB/s: 67 ms a token, however many there are."""
    workload = open_workload(BASE.format("tpot=50ms"))
    slow, fast = best_fleet([L4, H100], workload, Target(0.9))[::-1]
    assert (slow.option, slow.found.size, slow.found.tried) == (L4, None, ())
    assert slow.found.best.tpot is not None and slow.found.best.tpot.mean > 0.06
    assert fast.found.size is not None


def test_a_pool_that_scales_settles_at_the_square_root_rule() -> None:
    workload = open_workload("synthetic:rate=1.5,prompt=fixed(50),output=fixed(60),n=300")
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=1024),
        cache=CacheConfig(block_size=16, num_blocks=200, enable_prefix_caching=False),
    )
    option = FleetOption("fixed", lambda seed: Source(FixedStepTimes(0.1), config=config))
    # six seconds each: nine on average, by Little's law
    right = replicas_for(9.0, 4.0)
    # from 14 on it takes ten minutes more until it has settled
    for size in (2, 6, 14):
        settled = settled_size(option, size, workload, seconds=700.0)
        assert settled == pytest.approx(right, abs=1), size


def test_the_cheapest_comes_first() -> None:
    workload = open_workload(BASE.format("ttft=4"))
    for prices, first in (((0.1, 9.0), L4), ((9.0, 0.1), H100)):
        options = [
            replace(option, price_per_hour=price)
            for option, price in zip((L4, H100), prices, strict=True)
        ]
        answers = best_fleet(options, workload, Target(0.9))
        assert answers[0].option.kind == first.kind
        costs = [answer.price_per_hour for answer in answers]
        assert costs[0] is not None and costs[1] is not None and costs[0] < costs[1]
        best = answers[0].found.best
        assert best.cost == pytest.approx(costs[0] / 3600 / best.token_rate * 1e6)


@pytest.mark.parametrize(
    "other",
    [
        FleetOption.of_hardware(HardwareCard.named("H100-SXM"), MODEL, 2),
        replace(H100, max_num_batched_tokens=512),
        replace(H100, policy="sjf"),
        FleetOption.of_hardware(HardwareCard.named("H200-SXM"), MODEL),
        FleetOption.of_hardware(HardwareCard.named("H100-SXM"), find_model("llama-2-7b")),
    ],
    ids=lambda option: option.name,
)
def test_every_part_of_an_option_matters(other: FleetOption) -> None:
    assert ttft_of(H100) != ttft_of(other)


@cache
def ttft_of(option: FleetOption) -> object:
    spec = (
        "synthetic:rate=60,prompt=lognormal(1500,1),output=lognormal(60,1),n=150,"
        "classes=a(1,ttft=1)"
    )
    return run_fleet(option, 1, open_workload(spec)).ttft


def test_routers_matter() -> None:
    spec = "synthetic:rate=60,prompt=lognormal(1500,1),output=lognormal(60,1),n=150"
    least = run_fleet(H100, 2, open_workload(spec))
    turns = run_fleet(replace(H100, router="round-robin"), 2, open_workload(spec))
    assert least.ttft != turns.ttft


def test_what_cannot_be_answered() -> None:
    with pytest.raises(ConfigError, match="no request of the workload has a target"):
        best_fleet([H100], open_workload(BASE.format("priority=1")), Target())
    large = FleetOption.of_hardware(HardwareCard.named("L4"), find_model("llama-3.1-70b"))
    with pytest.raises(ConfigError, match=r"needs 1\d\d\.\d GiB for its weights"):
        best_fleet([large], open_workload(BASE.format("ttft=1")), Target())
    answers = best_fleet([large, H100], open_workload(BASE.format("ttft=4")), Target(0.5))
    assert [answer.option for answer in answers] == [H100]
