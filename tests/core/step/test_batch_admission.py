"""Admission looks ahead at memory."""

from __future__ import annotations

from paceline.core.request import Request
from tests.driving import Driver, adapter_use, ask, make_request


def preemptions(*, future_memory_check: bool) -> int:
    driver = Driver(num_blocks=40, max_num_seqs=16, future_memory_check=future_memory_check)
    for index in range(16):
        driver.add(make_request(f"r{index}", range(9 * index + 1, 9 * index + 9), 32))
    driver.run()
    assert len(driver.finished) == 16
    return driver.scheduler.stats().num_preemptions


def test_looking_ahead_at_memory_saves_preemptions() -> None:
    assert preemptions(future_memory_check=False) >= 8
    assert preemptions(future_memory_check=True) == 0


def test_shared_blocks_are_counted_once_when_looking_ahead() -> None:
    """Eight requests share 64 of their 68 tokens: together they need 16 + 8 * 3 blocks, and each
    alone 19."""
    driver = Driver(num_blocks=60, max_num_seqs=8, future_memory_check=True)
    prompt = list(range(1, 65))
    driver.add(make_request("first", [*prompt, 900, 901, 902, 903], 8))
    driver.step()
    driver.step()
    for index in range(7):
        driver.add(make_request(f"r{index}", [*prompt, *range(100 * index, 100 * index + 4)], 8))
    driver.step()
    assert driver.scheduler.stats().num_running == 8
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


def test_one_adapter_with_two_factors_takes_one_place_and_is_read_once() -> None:
    def adapted(name: str, slot: int, scale: float) -> Request:
        return ask(make_request(name, 8, 4), adapter=adapter_use(slot, scale))

    driver = Driver(num_blocks=40, max_num_seqs=8, max_adapters=1, max_skip_ahead=8)
    for name, slot, scale in (("a", 0, 1.0), ("half", 0, 0.5), ("other", 1, 1.0)):
        driver.add(adapted(name, slot, scale))
    driver.add(make_request("base", 8, 4))
    driver.step()
    running = {request.request_id for request in driver.scheduler.state.running.requests}
    assert running == {"a", "half", "base"}
    # two prompts of 8 tokens, one adapter
    assert driver.scheduler._adapters == (100, 10 * 16)
    driver.run()
    assert len(driver.finished) == 4


def test_at_the_cap_a_bounded_number_of_running_adapters_requests_pass_a_cold_one() -> None:
    """A B A A A ..., one adapter at a time, with forks of chunks and rows of the model between."""
    driver = Driver(num_blocks=400, max_num_seqs=4, max_adapters=1, max_skip_ahead=4, max_skips=6)
    for index, slot in enumerate([0, 1, 2, *[0] * 60]):
        driver.add(ask(make_request(f"r{index}", 20, 4), adapter=adapter_use(slot)))
    driver.run()
    order = [n.request_id for plan in driver.plans for n in plan.new_requests]
    assert len(driver.finished) == 63
    assert order.index("r1") <= 1 + 6
    assert order.index("r2") <= 2 + 2 * 6
