"""Three kinds of callers beyond what one replica can serve: what is kept must not collapse."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.core.slo import Slo
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Pool
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Simulator
from paceline.sim.workload.spec import open_workload

SECONDS = 25.0
# requests a second that one replica just serves in time for so long, batch work being put off until
# they have come, and more than it can
WITHIN, BEYOND = 8.0, 12.0
# seconds: first token, each token after it, the whole
TARGETS = {
    "interactive": (1.0, 0.1, None),
    "standard": (3.0, 0.15, None),
    "batch": (None, None, 30.0),
}


class Steps:
    """Seconds of a step as two cores take for a model of 135M parameters."""

    def another(self, seed: int) -> Steps:
        return self

    def seconds(self, plan: SchedulerOutput) -> float:
        wide = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        narrow = [row.start for row in plan.rows if row.num_tokens == 1]
        return 0.005 + 0.00046 * wide + 0.00055 * len(narrow) + 1e-6 * sum(narrow)


def arrivals(rate: float, begin: float, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    times = sorted(begin + rng.uniform(0.0, SECONDS) for _ in range(round(rate * SECONDS)))
    made = []
    for at in times:
        name = rng.choice(sorted(TARGETS))
        ttft, tpot, deadline = TARGETS[name]
        prompt, output = (
            min(1000, max(4, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
            for mean, sigma in ((310.0, 0.8), (60.0, 0.7))
        )
        made.append(
            Arrival(at, prompt, output, slo_class=name, ttft=ttft, tpot=tpot, deadline=deadline)
        )
    return made


def kept(served: Served) -> bool:
    ttft, tpot, deadline = TARGETS[served.arrival.slo_class]
    assert served.first_token is not None and served.last_token is not None
    slo = Slo(ttft=ttft, tpot=tpot, deadline=deadline)
    return not slo.violations(
        served.arrival.at, served.first_token, served.last_token, served.output_tokens
    )


# of the arrivals
seeds = pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (3, 5))]
)


@cache
def run(seed: int) -> tuple[float, float, dict[str, float]]:
    """Requests kept a second within capacity and, on the same replica later, beyond it; of the
    latter, the share of each class."""
    first, second = arrivals(WITHIN, 0.0, seed), arrivals(BEYOND, 100.0, seed + 1)
    config = ReplicaConfig(
        scheduler=SchedulerConfig(
            max_model_len=4096,
            policy="deadline",
        ),
        cache=CacheConfig(block_size=16, num_blocks=6000, enable_prefix_caching=False),
    )
    served: list[Served] = []
    Simulator(Pool.single(config, Steps()), served.append).run([*first, *second])
    assert len(served) == len(first) + len(second), "nothing that was accepted is lost"
    within = sum(kept(s) for s in served if s.arrival.at < 100.0) / SECONDS
    asked, good = Counter[str](), Counter[str]()
    for s in served:
        if s.arrival.at >= 100.0:
            asked[s.arrival.slo_class] += 1
            good[s.arrival.slo_class] += kept(s)
    shares = {name: good[name] / asked[name] for name in TARGETS}
    return within, good.total() / SECONDS, shares


@seeds
def test_beyond_capacity_as_much_is_kept_as_within_it(seed: int) -> None:
    within, beyond, _ = run(seed)
    assert within >= 0.85 * WITHIN, "it was not within capacity"
    assert beyond >= within


@seeds
def test_batch_work_is_done_in_time_once_the_others_ebb_and_costs_them_nothing(seed: int) -> None:
    _, _, shares = run(seed)
    assert shares["batch"] >= 0.5
    assert min(shares["interactive"], shares["standard"]) >= 0.65


class Quicker(Steps):
    """A fixed part of 4 ms, 0.4 ms a token and 1 us a key."""

    def seconds(self, plan: SchedulerOutput) -> float:
        keys = sum(row.start + row.num_tokens / 2 for row in plan.rows)
        return 0.004 + 4e-4 * plan.num_tokens + 1e-6 * keys


def test_late_requests_do_not_displace_those_to_come_where_all_have_targets() -> None:
    """Beyond capacity a moment in which none waits that can be on time is no reason to serve a late
    request as if it were in time: the next one to come would be late for it."""
    spec = (
        "synthetic:rate=6,cv=1,prompt=lognormal(255,1.0),output=lognormal(40,0.8),n=600,"
        "classes=chat(1,ttft=1,tpot=100ms)"
    )
    kept = {}
    for enabled in (True, False):
        config = ReplicaConfig(
            scheduler=SchedulerConfig(
                max_model_len=8192,
                policy="deadline",
                demote_late=enabled,
            ),
            cache=CacheConfig(block_size=16, num_blocks=8000, enable_prefix_caching=False),
        )
        served: list[Served] = []
        simulator = Simulator(Pool.single(config, Quicker()), served.append)
        simulator.run(open_workload(spec, seed=2))
        in_time = [s for s in served if s.ttft is not None and s.ttft <= 1.0]
        kept[enabled] = sum((s.tpot or 0.0) <= 0.1 for s in in_time) / len(served)
    assert kept[True] >= 0.84
    assert kept[True] >= kept[False] + 0.3
