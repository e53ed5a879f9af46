"""Light tenants under the fair policy: whom a flood must not hold up, nor push aside."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.outlook import MemoryOutlook
from paceline.core.outputs import SchedulerOutput
from paceline.core.pacing.tenants import TenantShares
from paceline.core.predict.step_time import StepShape
from paceline.core.queues.fair_queue import TenantWeights
from paceline.core.slo import Slo
from paceline.core.step import state
from paceline.errors import QueueFullError
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Pool
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Simulator
from tests.driving import Driver, adapter_use, ask, make_request


def test_light_is_at_most_half_an_equal_share() -> None:
    shares = TenantShares(TenantWeights({}))
    assert not shares.is_light("a"), "nobody else is there"
    for _ in range(7):
        shares.on_arrival("b")
    # with one more each, 8 requests of two tenants: an equal share is 4, half of it 2
    assert shares.is_light("a")
    shares.on_arrival("a")
    shares.on_arrival("b")
    assert shares.is_light("a")
    shares.on_arrival("a")
    assert not shares.is_light("a")
    assert not shares.is_light("b")
    for _ in range(8):
        shares.on_finish("b")
    assert not shares.is_light("a"), "nobody else is there any more"


def test_light_is_at_most_half_the_share_that_weights_give() -> None:
    shares = TenantShares(TenantWeights({"a": 3.0}))
    for _ in range(7):
        shares.on_arrival("b")
    # with one more, 8 requests: a's share is 6, half of it 3
    for _ in range(4):
        assert shares.is_light("a")
        shares.on_arrival("a")
    # of 12 it is 9, half of it 4.5, and this would be the fifth
    assert not shares.is_light("a")
    for _ in range(6):
        shares.on_finish("b")
    assert not shares.is_light("b"), "two of six are more than half of a quarter"


def test_flows_of_one_tenant_are_light_among_themselves() -> None:
    shares = TenantShares(TenantWeights({}))
    assert not shares.is_light("a", "x"), "nothing else is there"
    for _ in range(6):
        shares.on_arrival("a", "x")
    # with one more each, 7 requests of two flows: an equal share is 3.5, half of it 1.75
    assert shares.is_light("a", "y")
    assert shares.is_light("a", ""), "so is one for the model itself"
    assert not shares.is_light("a", "x")
    shares.on_arrival("a", "y")
    assert shares.is_light("a", "y"), "two of eight are half of four"
    shares.on_arrival("a", "y")
    assert not shares.is_light("a", "y")
    for _ in range(6):
        shares.on_finish("a", "x")
    assert not shares.is_light("a", "z"), "the flood is over"
    for _ in range(2):
        shares.on_finish("a", "y")
    assert shares.unfinished("a") == shares.unfinished("a", "y") == 0


def test_a_tenant_above_its_share_gains_nothing_by_many_adapters() -> None:
    shares = TenantShares(TenantWeights({}))
    for _ in range(3):
        shares.on_arrival("b")
        shares.on_arrival("a", "flood")
    # a has 4 of 7 with one more
    assert not any(shares.is_light("a", f"name{number}") for number in range(10))
    for _ in range(6):
        shares.on_arrival("b")
    # a has 4 of 13: no more than its share of 6.5, which x has none of
    assert shares.is_light("a", "x")


def test_several_flows_count_while_one_of_them_is_a_flood() -> None:
    shares, several = TenantShares(TenantWeights({})), []
    for adapter in "xyxyxx":
        shares.on_arrival("a", adapter)
        several.append(shares.step_rows)
    # of five, and one of a third flow, that one has half of a third
    assert several == [math.inf] * 4 + [2.0] * 2
    assert shares.has_other_flows("a", "x") and not shares.has_other_flows("b", "x")
    for _ in range(300):
        shares.on_arrival("a", "x")
    assert shares.has_other_flows("a", "x"), "y has requests"
    for _ in range(2):
        shares.on_finish("a", "y")
    assert not shares.has_others("a")
    assert shares.step_rows == math.inf and not shares.has_other_flows("a", "x")


def test_a_flood_of_one_adapter_leaves_places_in_the_queue_for_others() -> None:
    driver = Driver(policy="fair", num_blocks=400, max_num_seqs=2, max_num_waiting=80)
    driver.add(ask(make_request("base", 8, 4), adapter=None))
    refused = 0
    for number in range(100):
        try:
            driver.add(ask(make_request(f"flood{number}", 8, 4), adapter=adapter_use(1)))
        except QueueFullError as error:
            refused += 1
            assert error.reason == "queue-share"
            assert "requests for this adapter wait already" in str(error)
    assert refused
    driver.add(ask(make_request("rare", 8, 4), adapter=adapter_use(2)))
    driver.add(make_request("again", 8, 4))
    assert driver.scheduler._requests["rare"].boosted
    driver.run()


def test_several_tenants_lately() -> None:
    shares = TenantShares(TenantWeights({}))
    shares.on_arrival("a")
    assert shares.step_rows == math.inf
    shares.on_arrival("b")
    shares.on_finish("b")
    assert shares.step_rows == 3.0, "it was there lately"
    assert shares.has_others("a") and shares.has_others("b") and shares.has_others("c")
    for _ in range(300):
        shares.on_arrival("a")
        shares.on_finish("a")
    assert shares.step_rows == math.inf, "it has not come for long"
    assert not shares.has_others("a")
    assert shares.has_others("b")


@pytest.mark.parametrize(("policy", "rows"), [("deadline", 1), ("fcfs", 1), ("fair", 50)])
def test_triage_goes_through_as_many_rows_as_there_are_tenants_to_tell_apart(
    policy: str, rows: int
) -> None:
    """Callers name them, as many as they like."""
    driver = Driver(policy=policy)
    for index in range(100):
        slo = Slo(ttft=9.0)
        driver.add(make_request(f"r{index}", 4, 1, slo=slo, tenant=f"t{index % 50}"))
    targeted = driver.scheduler._paced.waiting_targets.targeted
    assert len(targeted) == rows
    assert sum(map(len, targeted.values())) == 100
    driver.run()
    assert not targeted


def test_somebody_whose_requests_last_long_is_still_there() -> None:
    shares = TenantShares(TenantWeights({}))
    shares.on_arrival("b")
    for _ in range(300):
        shares.on_arrival("a")
        shares.on_finish("a")
    assert shares.has_others("a")
    shares.on_finish("b")
    assert not shares.has_others("a")


def seconds(shape: StepShape) -> float:
    """20 ms a step and 1 ms a prompt token."""
    return 0.02 + 1e-3 * shape.wide_tokens


def trained(policy: str) -> Driver:
    driver = Driver(
        seconds=seconds,
        policy=policy,
        num_blocks=4000,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        enable_prefix_caching=False,
    )
    for index in range(120):
        shape = StepShape(0, 0.0, index % 5, 0)
        if index % 2:
            shape = shape.plus(0, 32 * (1 + index % 16))
        driver.scheduler.step_time.observe(shape, seconds(shape))
    return driver


def test_steps_are_shorter_while_tenants_that_are_kept_apart_share_the_engine() -> None:
    def longest(policy: str, *tenants: str) -> int:
        driver = trained(policy)
        for number, tenant in enumerate(tenants):
            driver.add(make_request(f"r{number}", 2000, 2, tenant=tenant))
        driver.run()
        return max(row.num_tokens for plan in driver.plans for row in plan.rows)

    # 20 ms are 3 % of 667 ms, and 15 % of 133 ms
    assert longest("fair", "a", "a") == longest("deadline", "a", "b") > 600
    assert longest("fair", "a", "b") < 200


def test_a_light_tenants_prompt_is_not_cut_short_by_those_that_run() -> None:
    driver = trained("fair")
    for number in range(4):
        driver.add(make_request(f"heavy{number}", 1500, 50, tenant="heavy"))
    driver.step()
    assert driver.plans[-1].rows[-1].request_id == "heavy0"
    driver.add(make_request("light", 900, 4, arrival=driver.now, tenant="light"))
    driver.step()
    rows = {row.request_id: row.num_tokens for row in driver.plans[-1].rows}
    assert rows["light"] == 900
    assert sum(rows.values()) - 900 <= 4, "a token each for the others"


def rows(driver: Driver) -> dict[str, int]:
    """Tokens by request of the step just planned."""
    return {row.request_id: row.num_tokens for row in driver.plans[-1].rows}


def test_nobody_makes_way_for_a_light_tenants_request_that_memory_keeps_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 400 tokens of memory; who runs will take 320 in the end, with the light tenant's 520
    driver = Driver(policy="fair", num_blocks=100, max_model_len=400, future_memory_check=True)
    driver.add(*(make_request(f"heavy{i}", 200, 120, tenant="heavy") for i in range(3)))
    driver.step()
    assert rows(driver) == {"heavy0": 64}
    driver.add(make_request("light", 80, 120, arrival=driver.now, tenant="light"))
    light = driver.scheduler._requests["light"]
    assert light.boosted and driver.scheduler._waiting.ordinary.peek() is light
    assert driver.scheduler.kv.shortfall(light, beside_others=True) == 0, "free for now"
    outlooks = []

    class Counted(MemoryOutlook):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            outlooks.append(self)

    monkeypatch.setattr(state, "MemoryOutlook", Counted)
    driver.step()
    assert len(outlooks) == 1, "memory is looked at once a step"
    assert rows(driver) == {"heavy0": 64}, "light is not let in, so heavy0 goes on"
    driver.step()
    assert rows(driver) == {"heavy0": 64}
    driver.run()


def test_what_is_cached_of_a_light_tenants_prompt_is_not_kept_free_for_it() -> None:
    driver = Driver(policy="fair", num_blocks=400, max_num_batched_tokens=80)
    prompt = list(range(500, 561))
    driver.add(make_request("before", prompt, 2, tenant="light"))
    driver.run()
    driver.add(*(make_request(f"heavy{i}", 300, 8, tenant="heavy") for i in range(3)))
    driver.step()
    assert rows(driver) == {"heavy0": 80}
    driver.add(make_request("light", prompt, 2, arrival=driver.now, tenant="light"))
    assert driver.scheduler._requests["light"].boosted
    driver.step()
    # 60 of its 61 tokens are cached: 79 are left, not 19
    assert rows(driver) == {"heavy0": 79, "light": 1}
    driver.run()


class Steps:
    """Seconds of a step on a small CPU."""

    def another(self, seed: int) -> Steps:
        return self

    def seconds(self, plan: SchedulerOutput) -> float:
        wide = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        return 0.006 + 0.0005 * wide + 0.0008 * len(plan.rows)


def p99(policy: str, heavy: float, seed: int = 5, *, adapters: bool = False) -> tuple[float, float]:
    """The light tenant's p99 TTFT beside a flood of so many requests a second, and the share of its
    requests that were on time. ``adapters``: both are adapters that one tenant asks for."""
    rng = random.Random(seed)

    def stream(rate: float, tenant: str) -> list[Arrival]:
        return [
            Arrival(
                rng.uniform(0.0, 70.0),
                rng.randint(20, 700),
                rng.randint(20, 120),
                tenant="" if adapters else tenant,
                adapter=tenant if adapters else "",
                slo_class="interactive",
                ttft=1.0,
                tpot=0.1,
            )
            for _ in range(round(70 * rate))
        ]

    arrivals = sorted([*stream(0.5, "light"), *stream(heavy, "heavy")], key=lambda a: a.at)
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_model_len=4096, policy=policy),
        cache=CacheConfig(block_size=16, num_blocks=6000, enable_prefix_caching=False),
    )
    served: list[Served] = []
    Simulator(Pool.single(config, Steps()), served.append).run(arrivals)
    ttfts = sorted(
        s.ttft
        for s in served
        # before that, step times are not known
        if "light" in (s.arrival.tenant, s.arrival.adapter)
        and s.arrival.at >= 10.0
        and s.ttft is not None
    )
    assert len(ttfts) >= 25
    return ttfts[-1], sum(ttft <= 1.0 for ttft in ttfts) / len(ttfts)


@pytest.mark.parametrize("heavy", [4.0, 10.0])
@pytest.mark.parametrize(
    "seed", [5, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (6, 7))]
)
def test_a_flood_neither_delays_nor_demotes_a_light_tenant(heavy: float, seed: int) -> None:
    alone, _ = p99("fair", 0.0, seed)
    beside, on_time = p99("fair", heavy, seed)
    assert beside <= 1.5 * alone
    assert on_time >= 0.95


@pytest.mark.parametrize("heavy", [4.0, 10.0])
@pytest.mark.parametrize(
    "seed", [5, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (6, 7))]
)
def test_a_flood_of_one_adapter_neither_delays_nor_demotes_another(heavy: float, seed: int) -> None:
    alone, _ = p99("fair", 0.0, seed, adapters=True)
    beside, on_time = p99("fair", heavy, seed, adapters=True)
    assert beside <= 1.5 * alone
    assert on_time >= 0.95


def test_without_fairness_it_does() -> None:
    alone, _ = p99("deadline", 0.0)
    beside, _ = p99("deadline", 10.0)
    assert beside > 10 * alone
