"""Fleets: how many replicas of which kind serve a workload within its targets, by simulation.

Step times are a hardware's roofline or any other source (``step_times.spec``), the scheduler is the
one that serves. This module does not know flags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, pairwise
from typing import Any

import numpy as np

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.errors import ConfigError
from paceline.fleet.controller import Scale, Spec
from paceline.routing import make_router
from paceline.sim.arrival import Arrival
from paceline.sim.fleet import FleetRouter
from paceline.sim.plan.search import Found, Target, smallest_fleet
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report.metrics import Metrics, Summary
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.roofline import HardwareCard, RooflineStepTimes
from paceline.sim.step_times.spec import Source

__all__ = ["FleetAnswer", "FleetOption", "best_fleet", "run_fleet", "settled_size"]

_BLOCK_SIZE = 16
# memory refuses longer requests than any model takes anyway
_MAX_MODEL_LEN = 1 << 20
# for a check before the search: number of requests run alone, seconds between them, and how far
# their attainment may be below that of the whole workload
_NUM_ALONE = 100
_ALONE_GAP = 1e5
_ALONE_NOISE = 0.05
# seconds until a replica has started
_START_SECONDS = 60.0
# seconds in which a pool gives up one replica
_SHRINK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class FleetOption:
    """One kind of replica."""

    # source of its speed, for tables
    kind: str
    # makes step times, and the settings that come with them, for each replica, by seed
    source: Callable[[int], Source]
    # GPUs of one replica
    gpus: int = 1
    # None: the recorded engine's where ``source`` is a recording, else first come, first served
    policy: str | None = None
    max_num_batched_tokens: int | None = None
    router: str = "least-outstanding"
    # price of one GPU; None: unknown
    price_per_hour: float | None = None

    @classmethod
    def of_hardware(
        cls, card: HardwareCard, model: ModelShape, gpus: int = 1, **others: Any
    ) -> FleetOption:
        """Make an option whose step times are a roofline; ``others`` are further fields."""
        return cls(card.name, partial(_roofline, card, model, gpus), gpus, **others)

    @property
    def name(self) -> str:
        """Name for tables, with the fields that may differ between options."""
        parts = [f"{self.gpus} x {self.kind}", self.policy]
        if self.max_num_batched_tokens is not None:
            parts.append(f"{self.max_num_batched_tokens} tokens/step")
        return ", ".join(part for part in parts if part)

    def spec(self, seed: int = 0) -> ReplicaSpec:
        """Make a replica. Raises ConfigError if the model does not fit, or a setting is wrong."""
        source = self.source(seed)
        config = source.config
        if config is None:
            num_blocks = source.num_blocks(_BLOCK_SIZE)
            if num_blocks is None:
                raise ConfigError(
                    f"{self.kind}: says nothing about memory; use a recording or a roofline"
                )
            cache = CacheConfig(block_size=_BLOCK_SIZE, num_blocks=num_blocks)
            config = ReplicaConfig(
                scheduler=SchedulerConfig(max_model_len=_MAX_MODEL_LEN), cache=cache
            )
        settings: dict[str, Any] = {}
        if self.policy is not None:
            settings["policy"] = self.policy
        if self.max_num_batched_tokens is not None:
            settings["max_num_batched_tokens"] = self.max_num_batched_tokens
        scheduler = replace(config.scheduler, **settings)
        return ReplicaSpec(replace(config, scheduler=scheduler), source.times)


def _roofline(card: HardwareCard, model: ModelShape, gpus: int, seed: int) -> Source:
    """Return a roofline. It has no noise, so the seed is not used."""
    times = RooflineStepTimes(card, model, degree=gpus)
    return Source(
        times, kv_bytes=times.kv_capacity_bytes, kv_bytes_per_token=model.kv_bytes_per_token()
    )


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """Result of the search for one option."""

    option: FleetOption
    # ``size`` is None where even the largest fleet misses the target
    found: Found
    # why no fleet meets the target, and what would; "" where one does
    reason: str = ""

    @property
    def gpus(self) -> int | None:
        """GPUs of the whole fleet; None without one."""
        return None if self.found.size is None else int(self.found.size) * self.option.gpus

    @property
    def price_per_hour(self) -> float | None:
        """Price of the whole fleet; None without one, or where it is unknown."""
        each = self.option.price_per_hour
        return None if self.gpus is None or each is None else self.gpus * each


def run_fleet(
    option: FleetOption,
    replicas: int,
    workload: Iterable[Arrival],
    *,
    prefix_block: int = 512,
    metrics: Metrics | None = None,
) -> Summary:
    """Simulate ``replicas`` of an option; a known price makes the cost.

    Args:
        metrics: collects the requests, for callers that want to read them.
    """
    metrics = Metrics() if metrics is None else metrics
    specs = tuple(option.spec(seed) for seed in range(replicas))
    pool = Pool(specs, make_router(option.router))
    Simulator(pool, metrics.add, prefix_block=prefix_block).run(workload)
    each = option.price_per_hour
    price = None if each is None else each * option.gpus * replicas
    return metrics.summary(option.name, price_per_hour=price)


def settled_size(
    option: FleetOption,
    size: int,
    workload: Iterable[Arrival],
    *,
    prefix_block: int = 512,
    seconds: float = 900.0,
) -> int:
    """Return the replicas that a fleet's pool with ``replicas = {min, max}`` settles at, from
    ``size`` on, if the workload comes again and again; ``first_token`` is its least TTFT target.

    At least ``seconds`` are simulated, and more while the pool still shrinks, which takes a minute
    for each replica. The number that was wanted longest in the last ``seconds / 3`` counts.
    """
    arrivals = list(workload)
    targets = [each.ttft for each in arrivals if each.ttft is not None]
    most = 2 * size
    scale = Scale(1, most, min(targets, default=1.0))
    spec = Spec(size, version="plan", drain_seconds=seconds, scale=scale)
    router = FleetRouter(spec, start_seconds=_START_SECONDS)
    pool = Pool(tuple(option.spec(seed) for seed in range(most + 1)), router)
    end, last, longest = 0.0, seconds / 3.0, seconds + _SHRINK_SECONDS * most

    def load() -> Iterator[Arrival]:
        nonlocal end
        for each in _repeated(arrivals):
            end = each.at
            if end >= longest or (end >= seconds and not _shrank(router.sizes, end - last)):
                return
            yield each

    Simulator(pool, lambda served: None, prefix_block=prefix_block).run(load())
    wanted: defaultdict[int, float] = defaultdict(float)
    for (at, number), (until, _) in pairwise([*router.sizes, (end, 0)]):
        wanted[number] += max(0.0, until - max(at, end - last))
    return max(wanted, key=wanted.__getitem__)


def _shrank(sizes: Sequence[tuple[float, int]], since: float) -> bool:
    """Whether fewer replicas are wanted now than at ``since``."""
    before = next((number for at, number in reversed(sizes) if at <= since), sizes[0][1])
    return sizes[-1][1] < before


def _repeated(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """Yield a workload again and again, at the same rate."""
    last = arrivals[-1].at - arrivals[0].at
    period = last * len(arrivals) / max(1, len(arrivals) - 1) or 1.0
    for turn in count():
        for each in arrivals:
            yield replace(each, at=each.at - arrivals[0].at + turn * period)


def best_fleet(
    options: Iterable[FleetOption],
    workload: Iterable[Arrival],
    target: Target,
    *,
    prefix_block: int = 512,
    most: int = 64,
    on_unfit: Callable[[FleetOption, str], None] | None = None,
) -> list[FleetAnswer]:
    """Return the smallest fleet of each option, cheapest first: by price if known, else by GPUs.

    Options that the model does not fit on are left out, and reported to ``on_unfit``. Where
    requests miss their targets even when each runs alone, no fleet is searched: more replicas
    would not help, and ``found.best`` is the run of requests alone.

    Raises:
        ConfigError: the model fits on none of them; or no request of the workload has a target,
            which any fleet would meet.
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
            if on_unfit is not None:
                on_unfit(option, str(error))
            continue

        # one at a time, requests are as fast as they can be
        alone_metrics = Metrics()
        alone = run_fleet(option, 1, _spaced(islice(workload, _NUM_ALONE)), metrics=alone_metrics)
        if alone.attainment < target.attainment - _ALONE_NOISE:
            reason = _why_not_alone(alone, alone_metrics, target)
            answers.append(FleetAnswer(option, Found(None, alone, ()), reason))
            continue

        def run(size: int, option: FleetOption = option) -> Summary:
            return run_fleet(option, size, workload, prefix_block=prefix_block)

        found = smallest_fleet(run, target, most=most)
        reason = ""
        if found.size is None:
            reason = (
                f"{found.best.attainment:.1%} of requests are within their targets with up to "
                f"{most} replicas, {target.attainment:.0%} are asked for: allow more with --most, "
                "or take faster replicas (--hardware, --gpus)"
            )
        answers.append(FleetAnswer(option, found, reason))
    if not answers:
        raise ConfigError("; ".join(unfit) or "no option was given")
    return sorted(answers, key=_rank)


def _why_not_alone(run: Summary, metrics: Metrics, target: Target) -> str:
    """Say which targets requests miss with a replica to themselves, and what to change."""
    said = [f"alone on a replica, {run.attainment:.1%} of requests are within their targets"]
    for metric, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E")):
        values = metrics.values(metric)
        wanted = metrics.targets(metric)
        if len(values) and wanted:
            reached = float(np.quantile(values, target.attainment))
            if reached > wanted[0]:
                said.append(
                    f"{label} reaches {1e3 * reached:.1f} ms at best, {1e3 * wanted[0]:g} ms are "
                    "asked for"
                )
    said += [f"{count} are refused: {reason}" for reason, count in run.refusals.items()]
    return (
        f"{'; '.join(said)}. More replicas do not help: take faster ones (--hardware, --gpus) or "
        "other targets"
    )


def _spaced(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    for index, arrival in enumerate(arrivals):
        yield replace(arrival, at=index * _ALONE_GAP, prefix=())


def _rank(answer: FleetAnswer) -> tuple[bool, float, int, float]:
    """Return the sort key: options that meet the target first; price, GPUs, attainment."""
    gpus = answer.gpus or 0
    price = answer.price_per_hour or 0.0
    return answer.found.size is None, price, gpus, -answer.found.best.attainment
