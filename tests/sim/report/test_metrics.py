"""Figures by hand: every number of a summary is computed here another way."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from paceline.sim.arrival import Arrival, Served
from paceline.sim.report.metrics import Metrics, cost_per_million
from paceline.sim.report.table import minutes, side_by_side


def served(
    at: float,
    first: float | None,
    last: float | None,
    tokens: int = 11,
    *,
    refused: bool = False,
    preemptions: int = 0,
    **arrival: object,
) -> Served:
    return Served(
        arrival=Arrival(at, 100, 11, **arrival),  # type: ignore[arg-type]
        replica=0,
        first_scheduled=None if first is None else at + 0.1,
        first_token=first,
        last_token=last,
        output_tokens=tokens,
        cached_tokens=25,
        preemptions=preemptions,
        refused=refused,
    )


def test_a_run_by_hand() -> None:
    metrics = Metrics()
    metrics.add(served(10.0, 10.5, 12.5, ttft=0.6, tpot=0.2, slo_class="chat"))  # met: tpot is 0.2
    metrics.add(served(11.0, 12.0, 13.0, ttft=0.6, slo_class="chat", preemptions=2))  # late
    metrics.add(served(12.0, 13.0, 13.0, 1, deadline=3.0, slo_class="batch"))  # met, one token
    metrics.add(served(13.0, None, None, 0, refused=True, slo_class="batch"))
    run = metrics.summary("x", price_per_hour=3.6)
    assert (run.requests, run.finished, run.refused, run.preemptions) == (4, 3, 1, 2)
    assert run.duration == pytest.approx(3.0)
    assert (run.prompt_tokens, run.cached_tokens, run.output_tokens) == (300, 75, 23)
    assert run.ttft is not None and run.tpot is not None and run.e2e is not None
    assert run.ttft.mean == pytest.approx(2.5 / 3) and run.ttft.p50 == pytest.approx(1.0)
    assert run.ttft.max == pytest.approx(1.0)
    assert (run.tpot.count, run.tpot.mean) == (2, pytest.approx(0.15))
    assert run.e2e.mean == pytest.approx((2.5 + 2.0 + 1.0) / 3)
    assert run.queued is not None and run.queued.max == pytest.approx(0.1)
    assert run.itl is None
    assert run.request_rate == pytest.approx(1.0)
    assert run.goodput == pytest.approx(2 / 3)
    assert run.attainment == pytest.approx(2 / 4)
    assert run.by_class["chat"].attainment == 0.5
    assert (run.by_class["batch"].refused, run.by_class["batch"].met) == (1, 1)
    assert run.wasted_tokens == pytest.approx(11 / 23)
    # 23 tokens in 3 s at 0.001 a second
    assert run.cost == pytest.approx(0.001 / (23 / 3) * 1e6)


def test_minutes_are_those_of_arrival() -> None:
    metrics = Metrics()
    metrics.add(served(59.0, 61.0, 62.0, ttft=3.0))
    metrics.add(served(59.5, 65.0, 66.0, ttft=3.0))
    assert minutes(metrics.summary()) == ""
    metrics.add(served(130.0, None, None, 0, refused=True))
    run = metrics.summary()
    assert minutes(run) == "attainment % by minute of arrival: 50 - 0"
    assert run.as_json()["by_minute"] == {
        "0": {"requests": 2, "met": 1, "refused": 0, "attainment": 0.5},
        "2": {"requests": 1, "met": 0, "refused": 1, "attainment": 0.0},
    }
    metrics.add(served(3 * 3600.0, 3 * 3600.5, 3 * 3600.6))
    assert minutes(metrics.summary()).endswith("-, and 121 minutes more")


def test_percentiles_are_of_all_values() -> None:
    rng = random.Random(1)
    metrics = Metrics()
    ttfts, ends = [], []
    for index in range(500):
        ttft, stream = rng.expovariate(2.0), rng.random()
        ttfts.append(ttft)
        ends.append((index % 40, ttft + stream))
        metrics.add(served(index, index + ttft, index + ttft + stream, 2 + index % 40))
    run = metrics.summary()
    assert run.ttft is not None
    assert run.ttft.p99 == pytest.approx(float(np.percentile(ttfts, 99)))
    assert run.ttft.p90 == pytest.approx(float(np.percentile(ttfts, 90)))
    longest = [e2e for length, e2e in ends if length >= 30]
    assert len(longest) / len(ends) == pytest.approx(0.25, abs=0.03)
    assert run.e2e_p99_longest == pytest.approx(float(np.percentile(longest, 99)), rel=0.05)


def test_gaps_are_sketched_within_one_percent() -> None:
    rng = random.Random(2)
    metrics = Metrics()
    gaps = [rng.lognormvariate(-3.0, 1.0) for _ in range(5000)]
    for gap in gaps:
        metrics.add_gap(gap)
    itl = metrics.summary().itl
    assert itl is not None
    for q, value in ((50, itl.p50), (90, itl.p90), (99, itl.p99)):
        # the sketch takes a value that was seen, numpy may go between two
        assert value == pytest.approx(float(np.percentile(gaps, q, method="lower")), rel=0.0101)
    assert itl.mean == pytest.approx(float(np.mean(gaps)))
    assert itl.max == max(gaps)
    weighted = Metrics()
    weighted.add_gap(0.1, 99)
    weighted.add_gap(5.0)
    weighted.add_gap(0.0)
    many = weighted.summary().itl
    assert many is not None and (many.count, many.max) == (101, 5.0)
    assert many.p50 == pytest.approx(0.1, rel=0.01)


def test_nothing_is_not_a_number_but_nothing() -> None:
    run = Metrics().summary("empty", price_per_hour=1.0)
    assert run.ttft is None and run.e2e_p99_longest is None
    assert (run.requests, run.goodput, run.attainment) == (0, 0.0, 0.0)
    assert run.cost == math.inf
    assert "empty" in side_by_side([run])


def test_table_and_json_say_the_same() -> None:
    one, two = Metrics(), Metrics()
    for metrics, slow in ((one, 1.0), (two, 3.0)):
        metrics.add(served(0.0, slow, 2 * slow, ttft=2.0, slo_class="chat"))
        metrics.add(served(1.0, 1 + slow, 1 + 2 * slow, slo_class="batch"))
    runs = [one.summary("fcfs"), two.summary("sjf", price_per_hour=2.0)]
    table = side_by_side(runs)
    rows = {
        cells[0]: cells[1:]
        for cells in ([c.strip() for c in line.strip("|").split("|")] for line in table.split("\n"))
    }
    assert rows[""] == ["fcfs", "sjf"]
    assert rows["TTFT mean ms"] == ["1000.0", "3000.0"]
    assert rows["attainment %"] == ["100.0", "50.0"]
    assert rows["attainment chat %"] == ["100.0", "0.0"]
    assert rows["cost per million tokens"][0] == "-"
    assert "ITL mean ms" not in rows, "no run has gaps"
    again = json.loads(json.dumps(runs[1].as_json()))
    assert again["by_class"]["chat"]["attainment"] == 0.0
    assert again["ttft"]["mean"] == 3.0


def test_cost() -> None:
    assert cost_per_million(1000.0, 3.6) == pytest.approx(1.0)
    assert cost_per_million(0.0, 3.6) == math.inf


def test_a_request_takes_forty_bytes() -> None:
    metrics = Metrics()
    metrics.add(served(0.0, 1.0, 2.0))
    tracemalloc.start()
    try:
        for index in range(50_000):
            metrics.add(served(index, index + 1.0, index + 2.0))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # arrays grow ahead of their need by an eighth
    assert held < 50_000 * 40 * 1.2


def test_goodput_does_not_count_the_drain() -> None:
    def run(output_seconds: float) -> float:
        metrics = Metrics()
        for at in range(11):
            metrics.add(served(at, at + 0.5, at + output_seconds))
        return metrics.summary().goodput

    # eleven requests in ten seconds of arrivals, however long the last one takes
    assert run(1.0) == run(100.0) == pytest.approx(1.1)
    at_once = Metrics()
    for _ in range(4):
        at_once.add(served(0.0, 0.5, 2.0))
    assert at_once.summary().goodput == pytest.approx(2.0)


def test_refusals_say_why_and_tenants_are_told_apart() -> None:
    metrics = Metrics()
    metrics.add(served(0.0, 0.5, 1.0, tenant="a", ttft=0.2))
    metrics.add(served(0.5, 0.6, 1.0, tenant="b", ttft=0.2))
    for _ in range(2):
        refusal = served(1.0, None, None, 0, refused=True, tenant="b")
        metrics.add(replace(refusal, reason="context limit"))
    metrics.add(replace(served(1.0, None, None, 0, refused=True), reason="queue-full"))
    run = metrics.summary("x")
    assert run.refusals == {"context limit": 2, "queue-full": 1}
    a, b = run.by_tenant["a"], run.by_tenant["b"]
    assert (a.requests, a.met, a.ttft_mean) == (1, 0, 0.5)
    assert (b.requests, b.met, b.refused, b.ttft_mean) == (3, 1, 2, pytest.approx(0.1))
    assert run.as_json()["by_tenant"]["b"]["attainment"] == pytest.approx(1 / 3)
    table = side_by_side([run])
    assert "| refused: context limit" in table and "TTFT mean of tenant a ms" in table
