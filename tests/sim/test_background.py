"""Work that nobody waits for beside requests that come and go: all of it is done, in bounded time,
however wrong the predicted time of a step is."""

from __future__ import annotations

import random

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.sim.arrival import Arrival, Served
from paceline.sim.live import run_live
from paceline.sim.pool import Pool
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Simulator

LINES = 120
PEOPLE = 4
REQUESTS = 12
OUTPUT = 48
# four times what it takes on a machine that nothing else keeps busy
MOST_STEPS = 5300
# for one of those people's requests, where nobody else takes the processors
MOST_SECONDS = 10.0


class Steps:
    """Two cores with a model of 135M parameters, of which others take ``busy`` times as much; every
    twentieth step stands still for a moment then."""

    def __init__(self, busy: float) -> None:
        self._busy = busy
        self._rng = random.Random(7)
        self.num_steps = 0

    def another(self, seed: int) -> Steps:
        return self

    def seconds(self, plan: SchedulerOutput) -> float:
        self.num_steps += 1
        wide = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        narrow = [row.start for row in plan.rows if row.num_tokens == 1]
        seconds = 0.005 + 0.00046 * wide + 0.00055 * len(narrow) + 1e-6 * sum(narrow)
        halt = 10.0 if self._busy and self._rng.random() < 0.05 else 1.0
        return seconds * (1.0 + self._busy * self._rng.random()) * halt


def people(ttft: float | None, tpot: float | None, gap: float) -> list[Arrival]:
    rng = random.Random(3)
    return [
        Arrival(
            gap * number + rng.uniform(0.0, 0.3),
            rng.randint(16, 96),
            OUTPUT,
            slo_class="interactive" if ttft else "standard",
            ttft=ttft,
            tpot=tpot,
        )
        for number in range(REQUESTS)
        for _ in range(PEOPLE)
    ]


@pytest.mark.parametrize(
    "busy", [*(pytest.param(busy, marks=pytest.mark.thorough) for busy in (0.0, 4.0)), 12.0]
)
@pytest.mark.parametrize(
    "targets",
    [
        pytest.param((1.0, 0.1), id="interactive"),
        pytest.param((None, None), id="standard", marks=pytest.mark.thorough),
    ],
)
def test_everybody_is_served(busy: float, targets: tuple[float | None, float | None]) -> None:
    rng = random.Random(1)
    lines = [Arrival(0.0, rng.randint(32, 256), 64, slo_class="batch") for _ in range(LINES)]
    others = people(*targets, gap=1.8 * (1.0 + busy))
    workload = sorted([*lines, *others], key=lambda arrival: arrival.at)
    config = ReplicaConfig(
        scheduler=SchedulerConfig(
            max_model_len=8192,
            policy="deadline",
        ),
        cache=CacheConfig(block_size=16, num_blocks=15_882),
    )
    # the engine's own loop, which ends when all is answered
    log = run_live(workload, config, Steps(busy))
    assert log.num_plans <= MOST_STEPS
    served: list[Served] = []
    steps = Steps(busy)
    Simulator(Pool.single(config, steps), served.append).run(workload)
    assert steps.num_steps <= MOST_STEPS
    assert len(served) == len(workload)
    assert not any(one.refused for one in served)
    waited = [one.e2e or 0.0 for one in served if one.arrival.slo_class != "batch"]
    assert max(waited) <= MOST_SECONDS * (1.0 + busy)
