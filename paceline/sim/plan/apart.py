"""Whether prompts and answers on different replicas pay: the highest rate of both ways, simulated.

The same decision runs as in a gateway (``routing.HandOvers``), over the same scheduler as in the
replicas. Means and arithmetic (``split``) leave out the queues, which is where the two ways differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from paceline.routing import PredictedRouter
from paceline.sim.plan.search import Found, Target, highest_rate
from paceline.sim.plan.split import prompt_step
from paceline.sim.pool import Disaggregation, Pool, ReplicaSpec
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report.metrics import Metrics, Summary
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import StepTimes
from paceline.sim.transfer import KVTransfer
from paceline.sim.workload.spec import open_workload

__all__ = [
    "ApartLoad",
    "Comparison",
    "Way",
    "best_ways",
    "compare_ways",
    "pool_of",
    "run_way",
    "split_above",
]

_MOST_PROMPT = 1 << 15


@dataclass(frozen=True, slots=True)
class ApartLoad:
    """Requests of one shape, arriving at random."""

    prompt_tokens: int
    output_tokens: int
    # targets of each, s
    ttft: float
    tpot: float
    # how many of them a simulation has
    requests: int = 200
    seed: int = 0

    def spec(self, rate: float) -> str:
        """Return the workload's specification at a rate."""
        return (
            f"synthetic:rate={rate!r},prompt=fixed({self.prompt_tokens}),"
            f"output=fixed({self.output_tokens}),n={self.requests},"
            f"classes=both(1,ttft={self.ttft!r},tpot={self.tpot!r})"
        )


@dataclass(frozen=True, slots=True)
class Way:
    """Replicas, and the highest rate that they carry."""

    # replicas for prompts; 0: all do both
    prompts: int
    outputs: int
    found: Found

    @property
    def name(self) -> str:
        return f"{self.prompts} : {self.outputs}" if self.prompts else f"{self.outputs} together"

    @property
    def rate(self) -> float:
        return self.found.size or 0.0


def split_above(times: StepTimes, tpot: float) -> int:
    """Return the fewest prompt tokens whose computation alone takes longer than the target of a
    token: in one piece they would make each stream of the replica miss it."""
    low, high = 1, _MOST_PROMPT
    while low < high:
        middle = (low + high) // 2
        if times.seconds(prompt_step(0, middle)) > tpot:
            high = middle
        else:
            low = middle + 1
    return low


def pool_of(
    config: ReplicaConfig,
    times: Callable[[int], StepTimes],
    prompts: int,
    outputs: int,
    transfer: KVTransfer,
    least: int,
) -> Pool:
    """Make a pool whose ``prompts`` replicas compute prompts for the others; 0: all do both."""
    specs = [ReplicaSpec(config, times(number)) for number in range(prompts + outputs)]
    if not prompts:
        return Pool(specs, PredictedRouter())
    cached = replace(config, cache=replace(config.cache, enable_prefix_caching=True))
    decode = [replace(spec, config=cached) for spec in specs[prompts:]]
    apart = Disaggregation(decode, transfer, PredictedRouter(), least)
    return Pool(specs[:prompts], PredictedRouter(), apart)


def run_way(pool: Pool, load: ApartLoad, rate: float) -> Summary:
    """Simulate one rate."""
    metrics = Metrics()
    Simulator(pool, metrics.add).run(open_workload(load.spec(rate), seed=load.seed))
    return metrics.summary("")


def best_ways(
    make: Callable[[int, int], Pool],
    load: ApartLoad,
    replicas: int,
    *,
    attainment: float = 0.9,
    guess: float = 1.0,
) -> list[Way]:
    """Return all together, then each split of as many replicas.

    Args:
        make: makes a pool of so many replicas for prompts, and so many others.
        guess: a rate of about the right size, without queues: tight targets allow far less.
    """
    ways = [(0, replicas), *((x, replicas - x) for x in range(1, replicas))]

    def run(prompts: int, outputs: int, rate: float) -> Summary:
        return run_way(make(prompts, outputs), load, rate)

    return [
        Way(
            prompts,
            outputs,
            highest_rate(
                lambda rate, p=prompts, o=outputs: run(p, o, rate),  # type: ignore[misc]
                Target(attainment), low=guess / 64.0, high=guess * 4.0, precision=0.06,
            ),
        )
        for prompts, outputs in ways
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rates of each way at several seeds, all together first."""

    rates: Mapping[str, Sequence[float]]

    @property
    def best(self) -> str:
        """Name of the split with the highest median."""
        _, *splits = self.rates
        return max(splits, key=lambda name: median(self.rates[name]))

    @property
    def num_better(self) -> int:
        """Seeds at which that split carries more than all together."""
        together = next(iter(self.rates.values()))
        return sum(a > b for a, b in zip(self.rates[self.best], together, strict=True))


def compare_ways(
    make: Callable[[int, int], Pool],
    load: ApartLoad,
    replicas: int,
    seeds: Sequence[int],
    *,
    guess: float = 1.0,
) -> Comparison:
    """Return the rates of all ways at each seed; see ``best_ways``."""
    found = [best_ways(make, replace(load, seed=seed), replicas, guess=guess) for seed in seeds]
    return Comparison(
        {ways[0].name: [way.rate for way in ways] for ways in zip(*found, strict=True)}
    )
