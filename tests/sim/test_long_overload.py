"""Minutes of twice what a server can do, and what comes after: nothing decays with time.

The first minute shows little of this: a queue that grows has not yet reached what bounds it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.overload.serving import as_served
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Pool
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes

PLACES, OUTPUT, STEP = 4, 25, 0.04
# requests a second: a place is free for the next one a step after it was left
CAPACITY = PLACES / ((OUTPUT + 1) * STEP)
MINUTE = 60.0
OVERLOADED = 3


def arrivals(rng: random.Random) -> Iterator[Arrival]:
    """Three minutes at twice the capacity, and two at 0.9 of it."""
    at = 0.0
    while at < (OVERLOADED + 2) * MINUTE:
        load = 2.0 if at < OVERLOADED * MINUTE else 0.9
        at += rng.expovariate(load * CAPACITY)
        yield Arrival(at, 5, OUTPUT, slo_class="chat", ttft=1.0)


def test_promises_hold_for_minutes_of_overload_and_at_once_after_it() -> None:
    served: list[Served] = []
    pool = Pool.single(as_served("deadline", max_num_seqs=PLACES), FixedStepTimes(STEP))
    totals = Simulator(pool, served.append).run(arrivals(random.Random(3)))
    shares = []
    for begin in (0.0, 60.0, 120.0, 210.0):
        came = [each for each in served if begin <= each.arrival.at < begin + MINUTE]
        good = sum(each.ttft is not None and each.ttft <= 1.0 for each in came)
        shares.append(good / min(len(came), CAPACITY * MINUTE))
    assert min(shares[:3]) >= 0.93, shares
    assert shares[3] >= 0.9, "half a minute later it is itself again"
    refused = [each for each in served if each.first_token is None]
    assert len(refused) > 0.3 * len(served)
    # a queue that grew without end would have had all of these in it
    assert totals.most_waiting[0] < len(refused) / 2
