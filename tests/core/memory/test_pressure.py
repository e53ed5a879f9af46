"""The pressure valve: levels, hysteresis, and what each level does to plans."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.memory.pressure import Pressure, PressureValve
from paceline.core.slo import Slo
from paceline.errors import QueueFullError
from tests.driving import Driver, make_request

BATCH = Slo(best_effort=True)


def test_levels_open_one_after_the_other_and_close_later_than_they_opened() -> None:
    valve = PressureValve(0.88)
    levels = [valve.update(use) for use in (0.87, 0.88, 0.92, 0.945, 0.98)]
    assert levels == [0, 1, 2, 3, 4]
    # 0.97 - 0.05, 0.94 - 0.05, 0.91 - 0.05, 0.88 - 0.05
    levels = [valve.update(use) for use in (0.93, 0.91, 0.87, 0.84, 0.82)]
    assert levels == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("threshold", [0.01, 0.04, 0.05])
def test_one_that_opens_early_closes_too(threshold: float) -> None:
    valve = PressureValve(threshold)
    assert valve.update(0.5) is Pressure.REFUSE
    assert valve.update(0.0) is Pressure.CLOSED


def test_it_does_not_flutter_around_a_threshold() -> None:
    valve = PressureValve(0.5)
    assert {valve.update(use) for use in (0.51, 0.49) * 5} == {1}


def test_a_threshold_of_one_keeps_it_closed_and_one_near_it_has_all_levels() -> None:
    assert PressureValve(1.0).update(1.0) is Pressure.CLOSED
    valve = PressureValve(0.98)
    assert valve.update(0.979) is Pressure.CLOSED
    assert valve.update(1.0) is Pressure.REFUSE


def driver(**options: Any) -> Driver:
    # 100 blocks of 4; the valve opens at 40 of them, its levels are 3 apart
    return Driver(num_blocks=100, pressure_threshold=0.4, max_num_batched_tokens=400, **options)


def test_level_1_makes_chunks_smaller() -> None:
    roomy, tight = driver(), driver()
    tight.add(make_request("big", range(1, 165), 9))
    tight.step()
    assert tight.scheduler.valve.level is Pressure.CLOSED, "what a step sees is the use before it"
    for each in (roomy, tight):
        each.add(make_request("new", range(500, 640), 2))
    assert roomy.plan().num_tokens == 140
    # a quarter of 400 less the running one, and that one's token
    assert tight.plan().num_tokens == 1 + 399 // 4
    assert tight.scheduler.stats().pressure_level == 1


def test_level_2_holds_best_effort_back_and_nobody_else() -> None:
    tight = driver()
    tight.add(make_request("big", range(1, 178), 9))
    tight.step()
    tight.add(make_request("batch", 4, slo=BATCH), make_request("paid", range(5, 9)))
    tight.step()
    assert tight.scheduler.stats().pressure_level == 2
    assert [row.request_id for row in tight.plans[-1].rows] == ["big", "paid"]
    tight.run()
    assert {"big", "batch", "paid"} == set(tight.finished), "it is held back, not lost"
    reasons = dict(tight.finished["batch"].timeline.waited)  # type: ignore[union-attr]
    assert reasons["pressure"] > 0.0


def test_level_2_lets_best_effort_displace_nobody() -> None:
    tight = driver(policy="priority", max_num_seqs=2)
    tight.add(make_request("big", range(1, 166), 9))
    tight.add(make_request("night", range(300, 308), 20, priority=5, slo=BATCH))
    tight.step()
    tight.add(make_request("batch", range(400, 404), 2, priority=0, slo=BATCH))
    tight.step()
    assert tight.scheduler.stats().pressure_level == 2
    assert tight.scheduler.stats().num_preemptions == 0
    tight.run()


def test_level_3_preempts_best_effort_for_the_others() -> None:
    tight = driver()
    tight.add(make_request("batch", range(1, 101), 40, slo=BATCH))
    tight.step()
    tight.add(make_request("paid", range(200, 290), 40))
    tight.step()
    tight.step()
    assert tight.scheduler.stats().pressure_level >= 3
    assert tight.scheduler.stats().num_preemptions == 1
    assert [row.request_id for row in tight.plans[-1].rows] == ["paid"]
    tight.run()
    assert tight.finished["batch"].num_preemptions >= 1


def test_what_nobody_waits_for_is_preempted_before_what_has_a_deadline() -> None:
    tight = driver()
    promised = Slo(slo_class="batch", best_effort=True, deadline=9000.0)
    # the deadline is late in the order, and still comes first
    tight.add(make_request("night", range(1, 61), 40, slo=BATCH))
    tight.add(make_request("promised", range(100, 160), 40, arrival=1.0, slo=promised))
    tight.step()
    tight.add(make_request("paid", range(200, 290), 40))
    tight.step()
    tight.step()
    assert tight.scheduler.stats().pressure_level >= 3
    running = {request.request_id for request in tight.scheduler._running.requests}
    assert running == {"paid", "promised"}
    tight.run()


def test_level_4_refuses_while_others_wait() -> None:
    tight = driver(max_num_seqs=2)
    tight.add(make_request("a", range(1, 121), 40), make_request("b", range(200, 290), 40))
    tight.step()
    tight.step()
    assert tight.scheduler.stats().pressure_level == 4
    tight.add(make_request("first", 4))
    with pytest.raises(QueueFullError, match="1 requests wait") as refused:
        tight.add(make_request("second", 4))
    assert refused.value.reason == "pressure"
    assert refused.value.retry_after > 0.0
    tight.run()
    assert dict(tight.scheduler.stats().refused) == {"pressure": 1}


def test_what_the_last_step_saw_is_over_once_nobody_is_left() -> None:
    """No step is planned while the engine has nothing to do."""
    tight = driver(max_num_seqs=2)
    tight.add(make_request("a", range(1, 121), 40), make_request("b", range(200, 290), 40))
    tight.step()
    tight.add(make_request("waiting", 4))
    tight.step()
    stats = tight.scheduler.stats()
    assert (stats.pressure_level, stats.blocked_by) == (4, "slots")
    # all callers hang up at once
    tight.abort("a", "b", "waiting")
    stats = tight.scheduler.stats()
    assert (stats.pressure_level, stats.blocked_by) == (0, None)
    tight.now += 3600.0
    # several come before the next step is planned
    tight.add(*(make_request(f"r{i}", 4, arrival=tight.now) for i in range(3)))
    tight.run()
    assert sum(seconds for _, seconds in tight.scheduler.stats().waited) < 100.0
