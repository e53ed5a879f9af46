"""Which engine has become slow, and how an engine comes back."""

from __future__ import annotations

import random

import pytest

from paceline.errors import ConfigError
from paceline.routing import (
    Breaker,
    BreakerSettings,
    Demand,
    EngineLoad,
    HedgeBudget,
    Pace,
    Pressure,
    SlowStart,
    choose,
    hedge_delay,
    is_worth_it,
    saturation,
    slow_ones,
)

DEMAND = Demand(prompt_tokens=100.0, max_tokens=64.0, output_tokens=32.0)


def paces(count: int, seconds: float = 0.1, samples: int = 60) -> dict[str, Pace]:
    found = {name: Pace() for name in "abcdef"[:count]}
    for pace in found.values():
        for _ in range(samples):
            pace.saw(seconds, 0.1)
    return found


def test_one_that_has_become_slow_is_found_and_found_well_again() -> None:
    found = paces(3)
    assert slow_ones(found, 3.0, 0.0) == []
    for _ in range(20):
        found["b"].saw(0.5, 0.1)
    assert slow_ones(found, 3.0, 1.0) == ["b"] and slow_ones(found, 0.0, 1.0) == []
    for _ in range(9):
        found["b"].saw(0.1, 0.1)
    # less than half of the recent past is not enough
    assert slow_ones(found, 3.0, 2.0) == ["b"]
    for _ in range(3):
        found["b"].saw(0.1, 0.1)
    assert slow_ones(found, 3.0, 3.0) == [] and found["b"].num_slow == 1


def test_a_pool_of_fast_and_slow_engines_has_no_slow_one() -> None:
    found = paces(2)
    for _ in range(100):
        found["a"].saw(0.02, 0.02)
        found["b"].saw(0.9, 0.9)
    assert slow_ones(found, 3.0, 0.0) == []


def test_load_that_makes_all_slow_makes_none_slow() -> None:
    found = paces(3)
    for pace in found.values():
        for _ in range(20):
            pace.saw(1.0, 0.1)
    assert slow_ones(found, 3.0, 0.0) == []


def test_never_more_than_half() -> None:
    found = paces(5)
    for number, name in enumerate("abc"):
        for _ in range(20):
            found[name].saw(1.0 + number, 0.1)
        slow_ones(found, 3.0, 0.0)
    assert slow_ones(found, 3.0, 0.0) == ["c", "b"][: 5 // 2]
    alone = paces(1)
    for _ in range(20):
        alone["a"].saw(9.0, 0.1)
    assert slow_ones(alone, 3.0, 0.0) == []


def test_what_stays_slow_is_what_is_usual() -> None:
    found = paces(2)
    for _ in range(20):
        found["a"].saw(0.5, 0.1)
    assert slow_ones(found, 3.0, 0.0) == ["a"]
    assert slow_ones(found, 3.0, 119.0) == ["a"]
    assert slow_ones(found, 3.0, 121.0) == []
    for _ in range(20):
        found["a"].saw(0.5, 0.1)
    assert slow_ones(found, 3.0, 200.0) == []


@pytest.mark.parametrize("seed", range(4))
def test_at_steady_load_at_most_two_opens_a_minute(seed: int) -> None:
    """Ten minutes of scattered first tokens, some of them ten times as late, ten a second."""
    draw = random.Random(seed)
    found = {name: Pace() for name in "abcd"}
    for tick in range(6000):
        now = tick / 10.0
        for pace in found.values():
            late = 10.0 if draw.random() < 0.1 else 1.0
            pace.saw(0.1 * late * draw.lognormvariate(0.0, 0.6), 0.1)
        slow_ones(found, 3.0, now)
    assert sum(pace.num_slow for pace in found.values()) <= 20
    assert max(pace.num_slow for pace in found.values()) <= 20


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_a_breaker_at_steady_load_opens_at_most_twice_a_minute(share: float) -> None:
    """An engine that fails a share of its requests, for ten minutes, twenty a second."""
    draw = random.Random(1)
    breaker = Breaker(BreakerSettings())
    opened = []
    for tick in range(12_000):
        now = tick / 20.0
        if breaker.allows(now):
            before = breaker.num_opened
            breaker.begin(now)
            (breaker.fail if draw.random() < share else breaker.succeed)(now)
            opened += [now] * (breaker.num_opened - before)
    minutes = [sum(1 for at in opened if m * 60 <= at < m * 60 + 60) for m in range(10)]
    assert max(minutes) <= 2, minutes


def test_a_slow_start() -> None:
    start = SlowStart(10.0)
    assert [start.share(0.0, now) for now in (0.0, 0.5, 5.0, 10.0)] == [0.1, 0.1, 0.5, 1.0]
    assert SlowStart(0.0).share(0.0, 0.0) == 1.0
    with pytest.raises(ConfigError, match="got -1"):
        SlowStart(-1.0)


def test_an_engine_gets_its_share() -> None:
    draw = random.Random(0)
    loads = [EngineLoad("a"), EngineLoad("b")]
    shares = (0.1, 1.0)
    picked = [0, 0]
    for _ in range(1000):
        views = [load.view(DEMAND, 0.0, s) for load, s in zip(loads, shares, strict=True)]
        picked[choose(views, DEMAND, draw)] += 1
    # half of a tenth
    assert 25 < picked[0] < 85
    # where nobody else is, a tenth is all
    assert choose([loads[0].view(DEMAND, 0.0, 0.0)], DEMAND, draw) == 0


def test_what_is_late_is_learned() -> None:
    load = EngineLoad("a")
    view = load.view(DEMAND, 0.0)
    assert hedge_delay(load, view, 0.2) is None
    for number in range(64):
        load.latency.saw_first(100.0, 0, 0.0, 0.1 if number % 20 else 0.4)
    view = load.view(DEMAND, 0.0)
    delay = hedge_delay(load, view, 0.0)
    assert delay is not None and 0.1 < delay < 0.8
    assert hedge_delay(load, view, 2.0) == 2.0


def test_hedges_are_saved_up_to_a_few() -> None:
    budget = HedgeBudget(0.5)
    for _ in range(100):
        budget.deposit()
    taken = 0
    while budget.has_one:
        budget.take()
        taken += 1
    assert taken == 5
    assert not HedgeBudget(0.0).has_one


def test_what_is_not_told_is_not_empty() -> None:
    load = EngineLoad("a")
    assert saturation(load, float("inf"), 0.0) is None
    assert saturation(load, 4.0, 0.0) == 0.0
    load.heard(Pressure(0.0, kv=0.3, waiting=0.0))
    assert saturation(load, float("inf"), 1.0) == 0.3
    assert saturation(load, float("inf"), 9.0) is None
    load.heard(Pressure(9.0, kv=0.3, waiting=2.0))
    assert saturation(load, 4.0, 9.0) == 1.0
    second = EngineLoad("b").view(DEMAND, 0.0)
    assert is_worth_it(DEMAND, 5.0, second, [0.1, 0.3], 0.7)
    assert is_worth_it(DEMAND, 5.0, second, [0.1, None], 0.7)
    for waited, full in (
        (0.01, [0.1]),
        (5.0, [0.8]),
        (5.0, [None, 0.1]),
        (5.0, [0.5, 1.0]),
        (5.0, []),
    ):
        assert not is_worth_it(DEMAND, waited, second, full, 0.7)
