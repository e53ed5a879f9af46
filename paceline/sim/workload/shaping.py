"""Changes to any stream of arrivals: scaled, sped up, jittered, cut, given classes.

Every function takes and returns a stream in order of ``at``. This module does not know the source
of arrivals.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from random import Random

from paceline.sim.arrival import Arrival
from paceline.sim.workload.base import WorkloadError
from paceline.sim.workload.lengths import whole_tokens

__all__ = [
    "SloMix", "jitter", "limit", "scale", "speed_up", "with_adapters", "with_classes",
    "with_tenants",
]  # fmt: skip


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise WorkloadError(message)


def scale(arrivals: Iterable[Arrival], prompt: float, output: float) -> Iterator[Arrival]:
    """Multiply lengths by a factor each, rounded, at least 1. Prefix identities stay: the caller
    scales ``prefix_block`` with the prompts."""
    for name, factor in (("scale", prompt), ("output_scale", output)):
        _require(0 < factor < math.inf, f"{name} must be positive, got {factor:g}")
    return (
        replace(
            arrival,
            prompt_tokens=whole_tokens(arrival.prompt_tokens * prompt),
            output_tokens=whole_tokens(arrival.output_tokens * output),
        )
        for arrival in arrivals
    )


def speed_up(arrivals: Iterable[Arrival], factor: float) -> Iterator[Arrival]:
    """Divide times by ``factor``: 2 is twice the load. Targets stay as they are."""
    _require(0 < factor < math.inf, f"speedup must be positive, got {factor:g}")
    return (replace(arrival, at=arrival.at / factor) for arrival in arrivals)


def jitter(arrivals: Iterable[Arrival], width: float, seed: int) -> Iterator[Arrival]:
    """Add a uniform 0 to ``width`` seconds to every stamp, and restore the order.

    For traces whose stamps were rounded down to a multiple of ``width`` (Mooncake's: 3 s), where
    all requests of one stamp would come at the same instant. Keeps the arrivals of ``width``
    seconds in memory.
    """
    _require(0 < width < math.inf, f"jitter must be positive, got {width:g} s")
    return _jitter(arrivals, width, Random(f"{seed}/jitter"))


def _jitter(arrivals: Iterable[Arrival], width: float, rng: Random) -> Iterator[Arrival]:
    held: list[tuple[float, int, Arrival]] = []
    for number, arrival in enumerate(arrivals):
        # later arrivals cannot be earlier than this stamp
        while held and held[0][0] <= arrival.at:
            yield heapq.heappop(held)[2]
        moved = replace(arrival, at=arrival.at + width * rng.random())
        heapq.heappush(held, (moved.at, number, moved))
    while held:
        yield heapq.heappop(held)[2]


def limit(
    arrivals: Iterable[Arrival], *, number: int | None = None, seconds: float | None = None
) -> Iterator[Arrival]:
    """Yield the first ``number`` arrivals, and only those before ``seconds``."""
    _require(number is None or number >= 1, f"n must be at least 1, got {number}")
    _require(seconds is None or seconds > 0, f"seconds must be positive, got {seconds}")
    return _until(islice(arrivals, number), math.inf if seconds is None else seconds)


def _until(arrivals: Iterable[Arrival], seconds: float) -> Iterator[Arrival]:
    for arrival in arrivals:
        if arrival.at >= seconds:
            return
        yield arrival


@dataclass(frozen=True, slots=True)
class SloMix:
    """One SLO class and its weight in draws."""

    slo_class: str
    # weight relative to the other classes
    weight: float
    # seconds; None: no such target
    ttft: float | None = None
    tpot: float | None = None
    deadline: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        _require(
            0 < self.weight < math.inf,
            f"class {self.slo_class!r}: weight must be positive, got {self.weight:g}",
        )
        for name in ("ttft", "tpot", "deadline"):
            value = getattr(self, name)
            _require(
                value is None or 0 < value < math.inf,
                f"class {self.slo_class!r}: {name} must be positive, got {value} s",
            )


def with_classes(
    arrivals: Iterable[Arrival], mix: Sequence[SloMix], seed: int
) -> Iterator[Arrival]:
    """Give every arrival one class of ``mix``, drawn by weight, with its targets."""
    _require(len(mix) > 0, "classes needs at least one class, got none")
    picks = _draws([entry.weight for entry in mix], Random(f"{seed}/classes"))
    for arrival, pick in zip(arrivals, picks, strict=False):
        chosen = mix[pick]
        yield replace(
            arrival,
            slo_class=chosen.slo_class,
            ttft=chosen.ttft,
            tpot=chosen.tpot,
            deadline=chosen.deadline,
            priority=chosen.priority,
        )


def with_tenants(
    arrivals: Iterable[Arrival], weights: Sequence[tuple[str, float]], seed: int
) -> Iterator[Arrival]:
    """Give every arrival a tenant, drawn by weight."""
    _require(len(weights) > 0, "tenants needs at least one tenant, got none")
    for name, weight in weights:
        _require(0 < weight < math.inf, f"tenant {name!r}: weight must be positive, got {weight:g}")
    picks = _draws([weight for _, weight in weights], Random(f"{seed}/tenants"))
    for arrival, pick in zip(arrivals, picks, strict=False):
        yield replace(arrival, tenant=weights[pick][0])


def with_adapters(
    arrivals: Iterable[Arrival], number: int, zipf: float, seed: int
) -> Iterator[Arrival]:
    """Give every arrival one of ``number`` adapters; of two, the k-th is drawn k**-zipf times as
    often as the first."""
    _require(number >= 1, f"adapters must be at least 1, got {number}")
    _require(0 <= zipf < math.inf, f"zipf must be 0 or more, got {zipf:g}")
    picks = _draws([rank**-zipf for rank in range(1, number + 1)], Random(f"{seed}/adapters"))
    for arrival, pick in zip(arrivals, picks, strict=False):
        yield replace(arrival, adapter=f"adapter-{pick + 1}")


def _draws(weights: Sequence[float], rng: Random) -> Iterator[int]:
    """Endless indices, by weight."""
    bounds = list(accumulate(weights))
    while True:
        yield min(bisect_right(bounds, rng.random() * bounds[-1]), len(bounds) - 1)
