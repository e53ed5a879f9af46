"""Who makes way for a better request that waits, and for how much of what it lacks."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from paceline.core.pacing import paced
from paceline.core.request import Request, RequestStatus
from paceline.core.slo import Slo
from paceline.core.step.displacement import Displaces, displace
from paceline.core.step.state import SchedulerState
from tests.driving import Driver, make_request


def test_nobody_is_preempted_for_one_whom_predicted_memory_keeps_out() -> None:
    driver = Driver(policy="fcfs", max_num_seqs=3, num_blocks=100, future_memory_check=True)
    batch = make_request("batch", 20, 60, slo=Slo(best_effort=True))
    driver.add(*(make_request(f"chat{i}", 40, 140) for i in range(2)), batch)
    for _ in range(6):
        driver.step()
    # beside two that will take 180 tokens of the 400 each, 240 more do not fit
    driver.add(make_request("big", 40, 200, arrival=driver.now))
    for _ in range(3):
        driver.step()
    assert batch.status is RequestStatus.RUNNING
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()


def test_as_many_are_preempted_as_predicted_memory_needs() -> None:
    driver = Driver(policy="priority", max_num_seqs=3, num_blocks=100, future_memory_check=True)
    driver.add(*(make_request(f"low{i}", 40, 85, priority=1) for i in range(3)))
    for _ in range(6):
        driver.step()
    assert driver.scheduler.stats().num_running == 3
    # one place would do, but memory would not last
    driver.add(make_request("urgent", 150, 100, arrival=driver.now, priority=0))
    driver.step()
    running = [request.request_id for request in driver.scheduler._running.requests]
    assert running == ["urgent", "low0"]
    assert driver.scheduler.stats().num_preemptions == 2
    driver.run()


def test_who_can_wait_makes_way_for_memory_that_is_only_predicted_to_be_short() -> None:
    driver = Driver(policy="priority", max_num_seqs=4, num_blocks=100, future_memory_check=True)
    prompts = (range(100 * i, 100 * i + 40) for i in range(3))
    driver.add(*(make_request(f"low{i}", p, 85, priority=1) for i, p in enumerate(prompts)))
    for _ in range(6):
        driver.step()
    assert driver.scheduler.stats().num_free_blocks > 60
    # there are a place and memory now; but when its 100 tokens are there, each of the others will
    # have 100 and more, and 388 are promised to all
    driver.add(make_request("urgent", range(500, 540), 60, arrival=driver.now, priority=0))
    driver.step()
    running = [request.request_id for request in driver.scheduler._running.requests]
    assert running == ["urgent", "low0", "low1"]
    assert driver.scheduler.stats().num_preemptions == 1
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 1
    # one of no higher priority waits
    driver.add(make_request("equal", range(900, 940), 60, arrival=driver.now, priority=1))
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 1
    assert driver.finished["urgent"].num_preemptions == 0


def test_blocks_that_rows_of_this_step_take_are_not_promised_to_who_displaces_others() -> None:
    driver = Driver(
        policy="priority", num_blocks=60, future_memory_check=True, max_num_batched_tokens=128
    )
    prompts = (range(100 * i, 100 * i + 40) for i in range(2))
    driver.add(*(make_request(f"low{i}", p, 76, priority=1) for i, p in enumerate(prompts)))
    driver.step()
    assert driver.scheduler.stats().num_running == 2
    # 232 tokens are promised to all. Beside one of these there will be 40 + 75 and 44 + 75 of the
    # other, although only 40 of the 44 have a block by now
    urgent = make_request("urgent", range(500, 540), 76, arrival=driver.now, priority=0)
    driver.add(urgent)
    driver.step()
    assert urgent.status is RequestStatus.RUNNING
    assert driver.scheduler.stats().num_running == 1
    driver.run()


def test_the_place_made_for_one_is_not_taken_by_best_effort_whose_turn_had_come() -> None:
    driver = Driver(policy="priority", max_num_seqs=2)
    driver.add(*(make_request(f"low{i}", 8, 40, priority=3) for i in range(2)))
    driver.step()
    # first by the policy's order, but it displaces nobody who is not best effort
    patient = make_request("patient", 8, 4, priority=0, slo=Slo(best_effort=True))
    urgent = make_request("urgent", 8, 4, arrival=driver.now, priority=1)
    driver.add(patient, urgent)
    driver.step()
    assert patient.order < urgent.order
    assert urgent.status is RequestStatus.RUNNING
    assert driver.scheduler.stats().num_preemptions == 1
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 1


class Displacements(Driver):
    """Writes down who was preempted for whom."""

    def __init__(self, patch: pytest.MonkeyPatch, **config: Any) -> None:
        super().__init__(**config)
        self.pairs: Counter[tuple[Request, Request]] = Counter()

        def watching(state: SchedulerState, head: Request, now: float, displaces: Displaces) -> int:
            before = list(self.scheduler._running.requests)
            lacking = displace(state, head, now, displaces)
            if lacking:
                gone = [r for r in before if r.status is RequestStatus.WAITING]
                self.pairs.update((head, loser) for loser in gone)
            return lacking

        patch.setattr(paced, "displace", watching)


@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_displaced_by_the_same_one_time_and_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is short, now and as predicted, and predictions are wrong: outputs end early."""
    rng = random.Random(seed)
    driver = Displacements(
        monkeypatch,
        policy="priority",
        max_num_seqs=6,
        num_blocks=100,
        depth=1 + seed % 2,
        future_memory_check=True,
        # priorities 20 s apart
        priority_ageing_s=20.0,
        max_num_batched_tokens=16 if seed % 3 else 64,
    )
    requests: list[Request] = []
    while len(requests) < 30 or driver.scheduler.has_unfinished:
        if len(requests) < 30 and rng.random() < 0.15:
            stops = frozenset(rng.sample(range(997), rng.choice([0, 20])))
            prompt = [rng.randrange(900) for _ in range(rng.randint(4, 60))]
            requests.append(
                make_request(
                    f"r{len(requests)}",
                    prompt,
                    rng.randint(2, 150),
                    arrival=driver.now,
                    priority=rng.randint(0, 3),
                    slo=Slo(best_effort=rng.random() < 0.2),
                    stop_token_ids=stops,
                )
            )
            driver.add(requests[-1])
        driver.step()
    assert driver.pairs, "nobody had to make way"
    for (head, _), times in driver.pairs.items():
        # unless it had to stop itself meanwhile
        assert times <= 1 + head.num_preemptions


def test_nobody_is_preempted_for_one_that_shares_its_prompt_and_would_not_fit_without_it() -> None:
    driver = Driver(policy="priority", max_num_seqs=2, num_blocks=100, future_memory_check=True)
    low = make_request("low", range(1000, 1100), 20, priority=1)
    driver.add(make_request("chat", 40, 140, priority=0), low)
    for _ in range(6):
        driver.step()
    assert low.status is RequestStatus.RUNNING
    # 4 tokens more than ``low``, whose blocks would be nobody's but its own once ``low`` has gone
    driver.add(make_request("big", range(1000, 1104), 140, arrival=driver.now, priority=0))
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()
