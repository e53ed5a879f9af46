"""Running requests stay in order, and so do the sums over them, whatever happens to them."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from paceline.core.queues.running import RunningList
from paceline.core.request import Request, RequestStatus
from paceline.core.slo import Slo
from paceline.core.tier import Move, Tier
from paceline.errors import QueueFullError
from tests.driving import Driver, make_request

BLOCK = 4
PROMISE = Slo(best_effort=True, deadline=80_000.0)
NIGHT = Slo(best_effort=True)


def scheduler_with(count: int = 0) -> tuple[Driver, RunningList]:
    driver = Driver(num_blocks=400, block_size=BLOCK, max_num_seqs=16)
    driver.add(*(make_request(f"r{i}", 8, 20, slo=PROMISE) for i in range(count)))
    return driver, driver.scheduler._running


def most(requests: list[Request]) -> list[int]:
    """By tier, as the list is to know it: all that each may have, and a block that is not full."""
    return [
        sum(
            r.num_prompt_tokens + r.asked.sampling.max_tokens + BLOCK
            for r in requests
            if r.tier == t
        )
        for t in Tier
    ]


def test_sums_go_up_when_requests_start_and_down_when_they_stop() -> None:
    driver, running = scheduler_with()
    assert running.most_tokens == [0, 0, 0, 0]
    driver.add(
        make_request("chat", 10, 30),
        make_request("promised", 20, 5, slo=PROMISE),
        make_request("night", 7, 9, slo=NIGHT),
    )
    assert running.most_tokens == [0, 0, 0, 0], "none runs yet"
    driver.step()
    assert running.most_tokens == [44, 29, 0, 20]
    driver.abort("chat")
    assert running.most_tokens == [0, 29, 0, 20]
    driver.run()
    assert running.most_tokens == [0, 0, 0, 0]


def test_a_move_takes_the_tokens_of_a_request_to_its_new_tier_and_it_to_its_new_place() -> None:
    driver, running = scheduler_with(3)
    driver.step()
    assert running.most_tokens == [0, 3 * 32, 0, 0]
    first = running.requests[0]

    def demote(request: Request) -> None:
        request.order = (1e9, request.order[1])
        request.move(Move.DEMOTE)

    running.move(first, demote)
    assert running.most_tokens == [0, 2 * 32, 32, 0]
    assert [r.request_id for r in running.requests] == ["r1", "r2", "r0"]
    running.check_integrity()
    running.preempt(first, driver.now)
    assert running.most_tokens == [0, 2 * 32, 0, 0]
    assert first.status is RequestStatus.WAITING and first in driver.scheduler._waiting
    driver.run()


def test_the_list_stays_the_same_one() -> None:
    """Other parts of the scheduler hold on to it."""
    driver, running = scheduler_with(4)
    requests = running.requests
    driver.step()
    assert len(requests) == 4
    driver.run()
    assert running.requests is requests and not requests


def test_integrity_finds_a_tier_that_was_changed_in_place() -> None:
    driver, running = scheduler_with(1)
    driver.step()
    running.requests[0].move(Move.DEMOTE)
    with pytest.raises(AssertionError, match="tier 1: 32 tokens at most, 0 counted"):
        running.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_those_of_the_running_requests_after_every_event(seed: int) -> None:
    """Requests of all tiers come, are cancelled, and make way for want of memory; the driver looks
    at the scheduler's own sums at every step too."""
    rng = random.Random(seed)
    driver = Driver(
        num_blocks=60,
        block_size=BLOCK,
        max_num_seqs=6,
        policy="priority",
        pressure_threshold=0.7,
        seconds=lambda shape: 0.01 + 0.001 * shape.wide_tokens,
    )
    running = driver.scheduler._running
    seen: set[Tier] = set()
    for number in range(300):
        if rng.random() < 0.3:
            slo = rng.choice(
                (Slo(), Slo(ttft=5.0), PROMISE, Slo(best_effort=True, deadline=20.0), NIGHT)
            )
            request = make_request(
                f"r{number}",
                [rng.randrange(900) for _ in range(rng.randint(1, 40))],
                rng.randint(1, 60),
                arrival=driver.now,
                priority=rng.randint(0, 3),
                slo=slo,
            )
            # refused while memory is nearly full
            with suppress(QueueFullError):
                driver.add(request)
        if rng.random() < 0.05 and driver.scheduler._requests:
            driver.abort(rng.choice(list(driver.scheduler._requests)))
        assert running.most_tokens == most(running.requests)
        driver.step()
        assert running.most_tokens == most(running.requests)
        seen.update(request.tier for request in running.requests)
    assert seen == set(Tier) and driver.scheduler.stats().num_preemptions > 0
    driver.run()
