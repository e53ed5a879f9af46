"""Arrival times of requests: streams of seconds, endless unless stated otherwise.

* renewal: gamma-distributed gaps of a given coefficient of variation; 1 is Poisson, above it
  bursty (Azure's 2023 code trace has 13), 0 is a metronome;
* diurnal: the same, at a rate that swings like a day, by stretching the clock;
* clients: many sources, each with its own rate, burstiness and lengths, whose sum is bursty because
  a few of them are (ServeGen, arXiv 2505.09999).

This module does not know files or SLOs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from paceline.sim.arrival import Arrival
from paceline.sim.workload.base import WorkloadError
from paceline.sim.workload.lengths import Lengths, Scaled

__all__ = ["Client", "client_arrivals", "diurnal", "draw_clients", "renewal"]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise WorkloadError(message)


def renewal(rate: float, cv: float, rng: Random) -> Iterator[float]:
    """Yield arrival times in seconds: gamma gaps with mean 1 / rate and deviation cv / rate.

    Raises:
        WorkloadError: a rate that is not positive, or a cv outside [0, 100].
    """
    _require(rate > 0 and math.isfinite(rate), f"rate must be positive, got {rate:g} requests/s")
    _require(0 <= cv <= 100, f"cv must be in [0, 100], got {cv:g}")
    return _renewal(rate, cv, rng)


def _renewal(rate: float, cv: float, rng: Random) -> Iterator[float]:
    now = 0.0
    if cv == 0:
        for index in count(1):
            yield index / rate
    # squared only when positive: a tiny cv underflows to a metronome
    shape = 1.0 / max(cv * cv, 1e-12)
    scale = 1.0 / (rate * shape)
    while True:
        now += rng.gammavariate(shape, scale)
        yield now


def diurnal(rate: float, cv: float, rng: Random, *, swing: float, period: float) -> Iterator[float]:
    """Yield times as ``renewal`` does, at the rate ``rate * (1 - swing * cos(2 pi t / period))``.

    The first arrival falls into the quietest hour. A renewal stream of rate 1 is read on the
    clock ``integral of the rate``, which keeps its burstiness at every hour.

    Args:
        swing: 0 is constant; 0.9 is a peak of 1.9 and a trough of 0.1 times the mean.
        period: seconds of one day.
    """
    _require(0 <= swing < 1, f"swing must be in [0, 1), got {swing:g}")
    _require(period > 0 and math.isfinite(period), f"period must be positive, got {period:g} s")
    unit = renewal(1.0, cv, rng)
    _require(rate > 0 and math.isfinite(rate), f"rate must be positive, got {rate:g} requests/s")
    return (_inverse(target / rate, swing, period) for target in unit)


def _inverse(target: float, swing: float, period: float) -> float:
    """Solve t - swing * period / (2 pi) * sin(2 pi t / period) = target, by bisection."""
    amplitude = swing * period / math.tau
    low, high = target - amplitude, target + amplitude
    for _ in range(60):
        middle = 0.5 * (low + high)
        if middle - amplitude * math.sin(math.tau * middle / period) < target:
            low = middle
        else:
            high = middle
    return max(0.0, 0.5 * (low + high))


@dataclass(frozen=True, slots=True)
class Client:
    """One source of requests."""

    name: str
    # requests per second
    rate: float
    # coefficient of variation of the gaps between its requests
    cv: float
    prompt: Lengths
    output: Lengths


def draw_clients(
    number: int,
    *,
    rate: float,
    skew: float,
    cv: float,
    cv_spread: float,
    prompt: Lengths,
    output: Lengths,
    spread: float,
    seed: int,
) -> tuple[Client, ...]:
    """Return ``number`` clients whose rates sum to ``rate``.

    Args:
        skew: rates fall like rank ** -skew (Zipf); 0 makes them equal.
        cv, cv_spread: each client's cv is ``cv * exp(cv_spread * N(0, 1))``, at most 50.
        spread: each client's prompts and outputs are the given ones times a factor of its own,
            ``exp(spread * N(0, 1))``; 0 makes them alike.
    """
    _require(1 <= number <= 100_000, f"clients must be between 1 and 100000, got {number}")
    _require(skew >= 0, f"skew must be 0 or more, got {skew:g}")
    _require(0 <= spread <= 3, f"spread must be in [0, 3], got {spread:g}")
    _require(0 <= cv_spread <= 3, f"cv_spread must be in [0, 3], got {cv_spread:g}")
    rng = Random(f"{seed}/clients")
    weights = [(rank + 1) ** -skew for rank in range(number)]
    total = sum(weights)
    clients = []
    for rank, weight in enumerate(weights):
        own_cv = min(50.0, cv * math.exp(cv_spread * rng.gauss(0.0, 1.0)))
        own_prompt = Scaled(prompt, math.exp(spread * rng.gauss(0.0, 1.0)))
        own_output = Scaled(output, math.exp(spread * rng.gauss(0.0, 1.0)))
        name = f"client-{rank}"
        clients.append(Client(name, rate * weight / total, own_cv, own_prompt, own_output))
    return tuple(clients)


def client_arrivals(clients: Sequence[Client], seed: int) -> Iterator[Arrival]:
    """Yield the merged stream of all clients, each with its own random sources; tenant = its name.

    Memory grows with the number of clients, not of requests.
    """
    _require(len(clients) > 0, "a workload needs at least one client, got none")
    times = [renewal(c.rate, c.cv, Random(f"{seed}/times/{c.name}")) for c in clients]
    lengths = [Random(f"{seed}/lengths/{c.name}") for c in clients]
    heads = [(next(stream), index) for index, stream in enumerate(times)]
    heapq.heapify(heads)
    while True:
        at, index = heads[0]
        client, rng = clients[index], lengths[index]
        yield Arrival(at, client.prompt.sample(rng), client.output.sample(rng), tenant=client.name)
        heapq.heapreplace(heads, (next(times[index]), index))
