"""Arrival processes and lengths have the moments they promise, and repeat by seed."""

from __future__ import annotations

import statistics
from itertools import islice
from random import Random

import pytest

from paceline.sim.workload.arrivals import client_arrivals, diurnal, draw_clients, renewal
from paceline.sim.workload.base import WorkloadError
from paceline.sim.workload.lengths import (
    Bimodal,
    Empirical,
    Fixed,
    Lengths,
    Lognormal,
    Scaled,
    Uniform,
)


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_renewal_has_its_rate_and_cv(cv: float) -> None:
    times = list(islice(renewal(20.0, cv, Random(1)), 20_000))
    between = gaps(times)
    assert statistics.mean(between) == pytest.approx(1 / 20, rel=0.06)
    assert statistics.pstdev(between) * 20 == pytest.approx(cv, rel=0.08, abs=1e-6)
    assert times == sorted(times)
    assert times == list(islice(renewal(20.0, cv, Random(1)), 20_000))


def test_diurnal_swings_and_keeps_its_mean() -> None:
    times = []
    for at in diurnal(10.0, 1.0, Random(2), swing=0.8, period=1000.0):
        if at > 4000:
            break
        times.append(at)
    assert len(times) == pytest.approx(40_000, rel=0.03)
    # the first quarter of a period around its end is the trough, the middle is the peak
    trough = sum((at + 125) % 1000 < 250 for at in times)
    peak = sum(375 <= at % 1000 < 625 for at in times)
    # integral of 1 -/+ 0.8 cos over a quarter period around 0: 0.25 -/+ 0.8 sqrt(2) / (2 pi)
    assert trough / len(times) == pytest.approx(0.25 - 0.180, abs=0.01)
    assert peak / len(times) == pytest.approx(0.25 + 0.180, abs=0.01)


def test_clients_share_the_rate_and_differ() -> None:
    clients = draw_clients(
        20,
        rate=40.0,
        skew=1.0,
        cv=1.0,
        cv_spread=0.5,
        prompt=Fixed(500),
        output=Fixed(50),
        spread=0.7,
        seed=3,
    )
    assert sum(c.rate for c in clients) == pytest.approx(40.0)
    assert clients[0].rate == pytest.approx(20 * clients[19].rate)
    arrivals = list(islice(client_arrivals(clients, seed=3), 8000))
    assert [a.at for a in arrivals] == sorted(a.at for a in arrivals)
    assert len(arrivals) / arrivals[-1].at == pytest.approx(40.0, rel=0.1)
    lengths = {a.tenant: a.prompt_tokens for a in arrivals}
    assert len(set(lengths.values())) > 15, "each client has lengths of its own"
    assert arrivals == list(islice(client_arrivals(clients, seed=3), 8000))
    assert arrivals != list(islice(client_arrivals(clients, seed=4), 8000))


@pytest.mark.parametrize(
    ("lengths", "mean"),
    [
        (Fixed(128), 128),
        (Uniform(10, 20), 15),
        (Lognormal(100, 0.5), 100 * 1.1331),
        (Bimodal(Fixed(10), Fixed(510), 0.5), 260),
        (Empirical([1, 2, 3]), 2),
        (Scaled(Fixed(100), 0.25), 25),
    ],
)
def test_lengths_have_their_means(lengths: Lengths, mean: float) -> None:
    rng = Random(5)
    drawn = [lengths.sample(rng) for _ in range(20_000)]
    assert min(drawn) >= 1
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(0),
        lambda: Uniform(5, 4),
        lambda: Lognormal(0.5, 1),
        lambda: Lognormal(10, -1),
        lambda: Bimodal(Fixed(1), Fixed(2), 1.5),
        lambda: Empirical([]),
        lambda: Scaled(Fixed(1), 0),
        lambda: renewal(0.0, 1.0, Random(0)),
        lambda: renewal(1.0, -1.0, Random(0)),
        lambda: diurnal(1.0, 1.0, Random(0), swing=1.0, period=10.0),
        lambda: diurnal(1.0, 1.0, Random(0), swing=0.5, period=0.0),
    ],
)
def test_impossible_values_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(WorkloadError):
        make()
