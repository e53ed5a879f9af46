"""The controller of a fleet in the simulator: an update, and a pool that follows its load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.errors import ConfigError
from paceline.fleet.controller import Scale, Spec
from paceline.routing import PredictedRouter
from paceline.sim.arrival import Arrival, Served
from paceline.sim.config import ReplicaConfig
from paceline.sim.fleet import FleetRouter
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes


def run(router: FleetRouter, places: int, arrivals: Iterator[Arrival]) -> list[Served]:
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048),
        cache=CacheConfig(block_size=16, num_blocks=200, enable_prefix_caching=False),
    )
    served: list[Served] = []
    specs = [ReplicaSpec(config, FixedStepTimes(0.1)) for _ in range(places)]
    Simulator(Pool(specs, router), served.append).run(arrivals)
    return served


def steady(rate: float, since: float, until: float) -> Iterator[Arrival]:
    for number in range(round((until - since) * rate)):
        yield Arrival(since + number / rate, 50, 20)


def test_an_update_replaces_every_replica_and_refuses_nothing() -> None:
    spec = Spec(3, version="v1", drain_seconds=100.0)
    router = FleetRouter(spec, start_seconds=5.0, changes={20.0: replace(spec, version="v2")})
    served = run(router, 4, steady(2.0, 0.0, 100.0))
    assert len(served) == 200 and not any(each.refused for each in served)
    versions = {each.version for each in router.controller.replicas.values()}
    assert versions == {"v2"} and router.controller.is_settled
    # three old ones, three new ones, in four places
    assert {each.replica for each in served} == {0, 1, 2, 3}


def test_a_pool_grows_at_once_and_shrinks_slowly() -> None:
    spec = Spec(1, version="v", drain_seconds=100.0, scale=Scale(1, 4, first_token=1.0))
    router = FleetRouter(spec, start_seconds=10.0)

    def day() -> Iterator[Arrival]:
        yield from steady(0.5, 0.0, 50.0)
        yield from steady(4.0, 50.0, 150.0)
        yield from steady(0.2, 150.0, 700.0)

    served = run(router, 5, day())
    assert not any(each.refused for each in served)
    sizes = router.sizes
    grown = [at for at, size in sizes if size >= 3]
    assert grown and 50.0 <= grown[0] <= 80.0, sizes
    shrinks = [at for (_, before), (at, size) in pairwise(sizes) if size < before]
    # nothing is given up within a minute of the moment that needed it
    assert (
        shrinks and min(shrinks) >= grown[0] + 60.0 and sizes[-1][1] < max(s for _, s in sizes)
    ), sizes
    assert router.replica_seconds < 0.75 * 4 * 700.0


def test_a_killed_replica_loses_nothing_and_is_replaced() -> None:
    router = FleetRouter(Spec(3, version="v"), start_seconds=5.0)
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048),
        cache=CacheConfig(block_size=16, num_blocks=200, enable_prefix_caching=False),
    )
    served: list[Served] = []
    specs = [ReplicaSpec(config, FixedStepTimes(0.1)) for _ in range(4)]
    simulator = Simulator(Pool(specs, router), served.append, kills=(10.0, 11.0, 40.0))
    arrivals = list(steady(2.0, 0.0, 100.0))
    totals = simulator.run(iter(arrivals))
    assert len(served) == totals.num_arrivals == 200 and simulator.num_resumed >= 3
    # each answer is whole, and its record is of the request as it was sent
    assert {each.output_tokens for each in served} == {20}
    assert {id(each.arrival) for each in served} == {id(each) for each in arrivals}
    assert all(each.ttft is not None and each.e2e is not None for each in served)
    assert all(each.e2e > each.ttft for each in served if each.e2e and each.ttft)
    names = set(router.controller.replicas)
    assert len(names) == 3 and not {"sim-1", "sim-2", "sim-3"} <= names
    assert router.controller.is_settled


def test_a_lone_replica_that_is_killed_goes_on_with_what_it_had() -> None:
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048),
        cache=CacheConfig(block_size=16, num_blocks=200),
    )
    served: list[Served] = []
    pool = Pool.single(config, FixedStepTimes(0.1))
    simulator = Simulator(pool, served.append, kills=(1.05,))
    simulator.run(iter([Arrival(0.0, 50, 20)]))
    (record,) = served
    assert simulator.num_resumed == 1 and record.output_tokens == 20
    # the first token was there before; half a step was lost
    assert record.ttft is not None and record.ttft < 0.3
    assert record.last_token is not None and 2.0 < record.last_token < 2.4


def test_a_lone_replica_of_a_router_that_predicts_is_killed() -> None:
    served: list[Served] = []
    simulator = Simulator(Pool(places(1), PredictedRouter()), served.append, kills=(1.05,))
    simulator.run(iter([Arrival(0.0, 50, 20)]))
    assert [each.output_tokens for each in served] == [20] and simulator.num_resumed == 1


def test_a_replica_that_was_stopped_and_still_runs_is_killed() -> None:
    old = Spec(2, version="v1", drain_seconds=1.0, surge=2)
    router = FleetRouter(old, start_seconds=1.0, changes={1.0: replace(old, version="v2")})
    served: list[Served] = []
    simulator = Simulator(Pool(places(4), router), served.append, kills=(19.5,))
    long = [Arrival(0.1 * n, 50, 500) for n in range(8)]
    simulator.run(iter([*long, *(Arrival(float(n), 50, 2) for n in range(2, 30))]))
    assert len(served) == 36 and simulator.num_resumed
    assert all(each.output_tokens == each.arrival.output_tokens for each in served)


def test_a_fleet_of_which_none_is_left_says_so() -> None:
    router = FleetRouter(Spec(1, version="v"), start_seconds=5.0)
    simulator = Simulator(Pool(places(2), router), lambda served: None, kills=(5.0,))
    with pytest.raises(ConfigError, match="no replica of the fleet serves at 5 s"):
        simulator.run(steady(1.0, 0.0, 20.0))


def places(count: int) -> list[ReplicaSpec]:
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048),
        cache=CacheConfig(block_size=16, num_blocks=200, enable_prefix_caching=False),
    )
    return [ReplicaSpec(config, FixedStepTimes(0.1)) for _ in range(count)]
