"""Requests by class."""

from __future__ import annotations

from paceline.core.slo import Slo
from paceline.engine.process.loop import take_census
from paceline.engine.types import ClassUse
from tests.driving import Driver, make_request


def test_who_runs_and_who_waits_by_class_and_their_blocks() -> None:
    driver = Driver(block_size=4, max_num_seqs=3)
    assert take_census(driver.scheduler.requests) == ()
    chat, batch = Slo(slo_class="chat"), Slo(slo_class="batch")
    driver.add(
        make_request("a", 9, slo=chat),
        make_request("b", 3, slo=batch),
        make_request("c", 5, slo=chat),
        make_request("d", 5, slo=chat, arrival=1.0),
    )
    driver.step()
    assert take_census(driver.scheduler.requests) == (
        ClassUse("batch", 1, 0, 1),
        ClassUse("chat", 2, 1, 5),
    )
    driver.run()
    assert take_census(driver.scheduler.requests) == ()
