"""Fleets: how many replicas of which kind serve a workload within its targets, by simulation.

Step times are a roofline of the hardware (``step_times.roofline``), the scheduler is the one that
serves. This module does not know flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.errors import ConfigError
from paceline.sim.arrival import Arrival
from paceline.sim.plan.search import Found, Target, smallest_fleet
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report import Metrics, Summary
from paceline.sim.routing import make_router
from paceline.sim.simulator import Pool, ReplicaSpec, Simulator
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.roofline import HardwareCard, RooflineStepTimes

__all__ = ["FleetAnswer", "FleetOption", "best_fleet", "run_fleet"]

_BLOCK_SIZE = 16
# longer requests than any model takes are refused by memory anyway
_MAX_MODEL_LEN = 1 << 20
# requests that are tried alone before a fleet is searched for, how far apart, and by how much their
# attainment may be below that of the whole workload
_NUM_ALONE = 100
_ALONE_GAP = 1e5
_ALONE_NOISE = 0.05


@dataclass(frozen=True, slots=True)
class FleetOption:
    """One kind of replica."""

    hardware: HardwareCard
    model: ModelShape
    # that share one replica
    gpus: int = 1
    policy: str = "fcfs"
    max_num_batched_tokens: int = 2048
    router: str = "least-outstanding"
    # of one GPU; None: unknown
    price_per_hour: float | None = None

    @property
    def name(self) -> str:
        """For tables: what may differ between options."""
        tokens = self.max_num_batched_tokens
        return f"{self.gpus} x {self.hardware.name}, {self.policy}, {tokens} tokens/step"

    def spec(self) -> ReplicaSpec:
        """One replica. Raises ConfigError if the model does not fit."""
        times = RooflineStepTimes(self.hardware, self.model, degree=self.gpus)
        scheduler = SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=_MAX_MODEL_LEN,
            policy=self.policy,
        )
        cache = CacheConfig(block_size=_BLOCK_SIZE, num_blocks=times.num_blocks(_BLOCK_SIZE))
        return ReplicaSpec(ReplicaConfig(scheduler=scheduler, cache=cache), times)


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """What the search found for one option."""

    option: FleetOption
    # None in ``size``: not even the largest fleet will do
    found: Found

    @property
    def gpus(self) -> int | None:
        """Of the whole fleet."""
        return None if self.found.size is None else int(self.found.size) * self.option.gpus

    @property
    def price_per_hour(self) -> float | None:
        """Of the whole fleet."""
        each = self.option.price_per_hour
        return None if self.gpus is None or each is None else self.gpus * each


def run_fleet(
    option: FleetOption, replicas: int, workload: Iterable[Arrival], *, prefix_block: int = 512
) -> Summary:
    """Simulate ``replicas`` of an option; its price, if known, goes into the cost."""
    metrics = Metrics()
    pool = Pool((option.spec(),) * replicas, make_router(option.router))
    Simulator(pool, metrics.add, prefix_block=prefix_block).run(workload)
    each = option.price_per_hour
    price = None if each is None else each * option.gpus * replicas
    return metrics.summary(option.name, price_per_hour=price)


def best_fleet(
    options: Iterable[FleetOption],
    workload: Iterable[Arrival],
    target: Target,
    *,
    prefix_block: int = 512,
    most: int = 64,
) -> list[FleetAnswer]:
    """The smallest fleet of each option, the cheapest first: by price where known, else by GPUs.

    Options that the model does not fit on are left out. Those on which a request misses its targets
    even when it is alone are not searched: no number of replicas will do, and ``found.best`` is the
    run of requests alone.

    Raises:
        ConfigError: it fits on none of them; or no request of the workload has a target, which
            any fleet would meet.
    """
    if all(a.ttft is None and a.tpot is None and a.deadline is None for a in workload):
        raise ConfigError(
            "no request of the workload has a target, so one replica is enough; give --ttft, "
            "--tpot or --deadline, or classes= in the workload"
        )
    answers: list[FleetAnswer] = []
    unfit: list[str] = []
    for option in options:
        try:
            option.spec()
        except ConfigError as error:
            unfit.append(str(error))
            continue

        # served one by one, requests are as fast as they will ever be
        alone = run_fleet(option, 1, _spaced(islice(workload, _NUM_ALONE)))
        if alone.attainment < target.attainment - _ALONE_NOISE:
            answers.append(FleetAnswer(option, Found(None, alone, ())))
            continue

        def run(size: int, option: FleetOption = option) -> Summary:
            return run_fleet(option, size, workload, prefix_block=prefix_block)

        answers.append(FleetAnswer(option, smallest_fleet(run, target, most=most)))
    if not answers:
        raise ConfigError("; ".join(unfit) or "no option was given")
    return sorted(answers, key=_rank)


def _spaced(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    for index, arrival in enumerate(arrivals):
        yield replace(arrival, at=index * _ALONE_GAP, prefix=())


def _rank(answer: FleetAnswer) -> tuple[bool, float, int, float]:
    """Those that meet the target first; then by price, GPUs and attainment."""
    gpus = answer.gpus or 0
    price = answer.price_per_hour or 0.0
    return answer.found.size is None, price, gpus, -answer.found.best.attainment
