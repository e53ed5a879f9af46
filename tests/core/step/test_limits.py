"""What exists for targets is not on the way of a step without them, but is once there is one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import paceline.core.pacing
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler
from paceline.core.slo import Slo
from tests.driving import Driver, make_request

PACING = f"{Path(paceline.core.pacing.__file__).parent}/"


@contextmanager
def calls_into_pacing() -> Iterator[Counter[str]]:
    """Calls of functions of ``core/pacing``, by name."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACING):
            calls[f"{code.co_filename.removeprefix(PACING)}:{code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


class Watched(Driver):
    """Counts what ``schedule`` and ``update`` enter of pacing; requests come and go beside it."""

    def __init__(self, **config: Any) -> None:
        settings = {"max_num_seqs": 4, "num_blocks": 30, "adaptive_token_budget": True}
        super().__init__(
            seconds=lambda shape: 0.01 + 0.001 * shape.wide_tokens, **(settings | config)
        )
        self.calls: Counter[str] = Counter()
        watched = self.scheduler
        schedule, update = watched.schedule, watched.update

        def counted(function: Any) -> Any:
            def call(*args: Any) -> Any:
                with calls_into_pacing() as calls:
                    returned = function(*args)
                self.calls += calls
                return returned

            return call

        watched.schedule = counted(schedule)  # type: ignore[method-assign]
        watched.update = counted(update)  # type: ignore[method-assign]

    def entered(self, steps: int = 1) -> Counter[str]:
        """What so many steps enter."""
        self.calls.clear()
        for _ in range(steps):
            assert self.step()
        return Counter(self.calls)


def plain(number: int, **asked: Any) -> Request:
    prompt = [number * 7 % 900 + i for i in range(20 + number % 9)]
    return make_request(f"r{number}", prompt, 24, priority=number % 3, **asked)


def is_plain(scheduler: Scheduler) -> bool:
    return scheduler._pacing is scheduler._plain


@pytest.mark.parametrize("adaptive", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("future_memory_check", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_steps_without_targets_do_not_enter_pacing(
    policy: str, future_memory_check: bool, adaptive: bool
) -> None:
    """Places and memory are short, requests make way for others, forks and cancellations come."""
    driver = Watched(
        policy=policy, future_memory_check=future_memory_check, adaptive_token_budget=adaptive
    )
    for number in range(12):
        driver.add(plain(number, arrival=driver.now))
    driver.add(plain(12), make_request("fork", plain(12).asked.prompt_token_ids, 4, fork_of="r12"))
    for number in range(13, 60):
        driver.step()
        driver.step()
        driver.add(plain(number, arrival=driver.now))
        if number % 10 == 0:
            driver.abort(f"r{number - 3}")
    driver.run()
    assert driver.scheduler.step_time.ready, "the models are trained and still not asked"
    assert driver.scheduler.stats().num_preemptions > 0 or future_memory_check
    assert is_plain(driver.scheduler)
    # the last request has ended: that is told to pacing, outside of the steps' own way
    assert {name for name in driver.calls if not name.endswith(".rest")} == set()
    assert set(driver.calls.values()) == {1}


@pytest.mark.parametrize(
    "slo",
    [
        Slo(ttft=5.0),
        Slo(tpot=1.0),
        Slo(best_effort=True),
        Slo(best_effort=True, deadline=500.0),
    ],
    ids=["ttft", "tpot", "background", "deadline"],
)
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_the_first_request_with_a_target_switches_and_the_end_of_the_last_switches_back(
    policy: str, slo: Slo
) -> None:
    driver = Watched(policy=policy)
    scheduler = driver.scheduler
    driver.add(plain(0), plain(1))
    assert not driver.entered(3) and is_plain(scheduler)
    driver.add(plain(2, arrival=driver.now, slo=slo))
    assert scheduler._pacing is scheduler._paced
    entered = driver.entered()
    assert entered["paced.py:Paced.begin"] == 1
    # without the one that asked for it, the others may still yield to what it brought about
    driver.abort("r2")
    assert scheduler._pacing is scheduler._paced
    driver.run()
    assert is_plain(scheduler)
    driver.add(plain(3, arrival=driver.now))
    assert not driver.entered(3)
    driver.run()


def test_what_a_request_asks_of_the_queue_alone_needs_no_pacing() -> None:
    driver = Watched()
    driver.add(plain(0, slo=Slo(slo_class="other", queue_ttl=50.0)))
    assert is_plain(driver.scheduler) and not driver.entered(3)
    driver.run()


def test_tenants_that_are_kept_apart_need_pacing_always() -> None:
    driver = Watched(policy="fair")
    for number in range(2):
        driver.add(plain(number, arrival=driver.now))
        assert driver.entered()["paced.py:Paced.begin"] == 1
        driver.run()
        assert driver.scheduler._pacing is driver.scheduler._paced
