"""The gateway's queue is the engines' scheduler, and decides as the simulator does."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from paceline.core.outputs import SchedulerOutput
from paceline.core.policies import POLICIES
from paceline.core.slo import Slo
from paceline.errors import QueueFullError
from paceline.gateway.routing.endpoint_queue import EndpointQueue, Queued, slot_scheduler
from paceline.sim.arrival import Arrival
from paceline.sim.config import ReplicaConfig
from paceline.sim.pool import Pool
from paceline.sim.replica import slo_of
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes

PLACE_SECONDS = 0.25


def arrivals(seed: int) -> Iterator[Arrival]:
    rng = random.Random(seed)
    at = 0.0
    for number in range(200):
        # bursts, and quiet times in which the queue runs empty
        at += rng.choice((0.0, 0.01, 0.1, 0.6))
        slo_class = rng.choice(("standard", "interactive", "batch"))
        yield Arrival(
            at,
            1,
            1,
            slo_class=slo_class,
            ttft=rng.choice((None, 0.5, 2.0, 9.0)) if slo_class != "batch" else None,
            tenant=f"t{number % 5 if rng.random() < 0.5 else 0}",
            priority=rng.randrange(3),
        )


def by_gateway(policy: str, seed: int, *, at_once: bool = True) -> list[str]:
    """Decisions of the gateway: a place that is free again so long after it was given.

    ``at_once`` adds requests as they come; else when a place is free, as an engine's loop reads its
    messages between steps, which ``fair`` can tell: a tenant's level is looked up then.
    """
    queue = EndpointQueue(policy)
    found = []
    free_at: float | None = None

    def add(number: int, arrival: Arrival) -> None:
        slo = slo_of(arrival)
        queue.add(Queued(f"{number}/0", arrival.at, 1, arrival.priority, arrival.tenant, slo))

    waiting = list(enumerate(arrivals(seed)))[::-1]
    now = 0.0
    while waiting or len(queue):
        next_at = waiting[-1][1].at if waiting else float("inf")
        if free_at is not None and (free_at < next_at or not at_once):
            now, free_at = free_at, None
            queue.free(now)
        else:
            number, arrival = waiting.pop()
            now = max(now, arrival.at)
            slo = slo_of(arrival)
            queue.add(Queued(f"{number}/0", arrival.at, 1, arrival.priority, arrival.tenant, slo))
            if waiting and waiting[-1][1].at <= now:
                continue
        if not at_once and free_at is None:
            while waiting and waiting[-1][1].at <= now:
                add(*waiting.pop())
        queue.check_integrity()
        if free_at is None and (given := queue.next(now)) is not None:
            found.append(f"{now:.6f} {given}")
            free_at = now + PLACE_SECONDS
    return found


def by_simulator(policy: str, seed: int) -> list[str]:
    scheduler, cache = slot_scheduler(policy)
    config = ReplicaConfig(scheduler=scheduler, cache=cache, pipeline_depth=1)
    found = []

    def on_plan(_: int, plan: SchedulerOutput, now: float, start: float, end: float) -> None:
        found.append(f"{now:.6f} {plan.rows[0].request_id}")

    pool = Pool.single(config, FixedStepTimes(PLACE_SECONDS))
    Simulator(pool, lambda _: None, on_plan=on_plan).run(arrivals(seed))
    return found


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"phase-aligned"}))
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.thorough) for s in (1, 2))]
)
def test_decisions_are_the_simulators(policy: str, seed: int) -> None:
    """phase-aligned waits by the clock, which stands still here."""
    simulated = by_simulator(policy, seed)
    assert len(simulated) == 200
    assert by_gateway(policy, seed, at_once=False) == simulated
    if policy != "fair":
        assert by_gateway(policy, seed) == simulated


def test_policies_differ() -> None:
    orders = {tuple(by_gateway(policy, 0)) for policy in ("fcfs", "priority", "fair", "deadline")}
    assert len(orders) == 4


def test_targets_come_first() -> None:
    queue = EndpointQueue("deadline")
    queue.add(Queued("late", 0.0, 8, slo=Slo(ttft=60.0)))
    queue.add(Queued("soon", 0.1, 8, slo=Slo(ttft=2.0)))
    assert queue.next(0.2) == "soon"
    queue.free(1.0)
    assert queue.next(1.0) == "late" and len(queue) == 0


def test_it_is_bounded_in_number_and_time() -> None:
    queue = EndpointQueue("fcfs", max_waiting=2, timeout=5.0)
    # the place that is about to be given counts, too
    for number in range(3):
        queue.add(Queued(str(number), float(number), 8))
    with pytest.raises(QueueFullError) as refused:
        queue.add(Queued("3", 2.0, 8))
    assert refused.value.retry_after > 0.0
    queue.leave("0")
    queue.leave("nobody")
    assert queue.next(7.5) is None
    assert [each.request_id for each in queue.expired()] == ["1", "2"] and len(queue) == 0
