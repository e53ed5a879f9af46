"""Light tenants under the fair policy: whom a flood must not hold up, nor push aside."""

from __future__ import annotations

import random

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.core.shares import TenantShares
from paceline.sim.arrival import Arrival, Served
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Pool, Simulator


def test_light_is_at_most_half_an_equal_share() -> None:
    shares = TenantShares()
    assert not shares.is_light("a"), "nobody else is there"
    for _ in range(7):
        shares.came("b")
    # with one more each, 8 requests of two tenants: an equal share is 4, half of it 2
    assert shares.is_light("a")
    shares.came("a")
    shares.came("b")
    assert shares.is_light("a")
    shares.came("a")
    assert not shares.is_light("a")
    assert not shares.is_light("b")
    for _ in range(8):
        shares.went("b")
    assert not shares.is_light("a"), "nobody else is there any more"


class Steps:
    """Seconds of a step on a small CPU."""

    def another(self, seed: int) -> Steps:
        return self

    def seconds(self, plan: SchedulerOutput) -> float:
        wide = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        return 0.006 + 0.0005 * wide + 0.0008 * len(plan.rows)


def p99(policy: str, heavy: float) -> tuple[float, int]:
    """The light tenant's p99 TTFT beside a flood of so many requests a second, and how many of its
    requests were on time."""
    rng = random.Random(5)

    def stream(rate: float, tenant: str) -> list[Arrival]:
        return [
            Arrival(
                rng.uniform(0.0, 60.0),
                rng.randint(20, 700),
                rng.randint(20, 120),
                tenant=tenant,
                slo_class="interactive",
                ttft=1.0,
                tpot=0.1,
            )
            for _ in range(round(60 * rate))
        ]

    arrivals = sorted([*stream(0.5, "light"), *stream(heavy, "heavy")], key=lambda a: a.at)
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_model_len=4096, policy=policy),
        cache=CacheConfig(block_size=16, num_blocks=6000, enable_prefix_caching=False),
    )
    served: list[Served] = []
    Simulator(Pool.single(config, Steps()), served.append).run(arrivals)
    ttfts = sorted(s.ttft for s in served if s.arrival.tenant == "light" and s.ttft is not None)
    assert len(ttfts) == 30
    return ttfts[-1], sum(ttft <= 1.0 for ttft in ttfts)


@pytest.mark.parametrize("heavy", [4.0, 10.0])
def test_a_flood_neither_delays_nor_relegates_a_light_tenant(heavy: float) -> None:
    alone, _ = p99("fair", 0.0)
    beside, on_time = p99("fair", heavy)
    assert beside <= 2.5 * alone
    assert on_time >= 27


def test_without_fairness_it_does() -> None:
    alone, _ = p99("deadline", 0.0)
    beside, _ = p99("deadline", 10.0)
    assert beside > 10 * alone
