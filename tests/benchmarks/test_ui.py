"""The page's benchmark says what it measured, and whether that is as it should be."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from benchmarks import timeline_tap
from benchmarks.ui import first_visit, judged
from paceline.backends.reference.null import NullBackend
from paceline.core.outputs import SchedulerOutput, StepResult


def test_figures_are_judged_by_the_bad_end_of_their_interval() -> None:
    results = {
        "tap_share_of_schedule": 0.09,
        "core_share": 0.021,
        # the median is well, and more than is asked cannot be excluded
        "viewers_itl_p99_ratio": [1.001, 0.99, 1.04],
        "frames_per_s": 55.0,
        "itl_p99_ms": [12.0, 12.0],
    }
    assert judged(results) == {
        "tap_share_of_schedule": True,
        "core_share": False,
        "viewers_itl_p99_ratio": False,
        "frames_per_s": True,
    }


def test_a_first_visit_is_a_part_of_all_files_and_stays_small() -> None:
    found = first_visit()
    assert 20_000 < found["bytes_gz"] <= 150_000
    assert found["bytes_gz"] < found["bytes_of_all_files"] <= 350 * 1024


@pytest.mark.thorough
def test_both_engines_have_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine is held up by while one of them has its turn."""
    told, silent = (timeline_tap.Side(64, told=told) for told in (True, False))
    told.run(300)
    execute = NullBackend.execute

    def slowly(backend: NullBackend, plan: SchedulerOutput) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        result = execute(backend, plan).result()
        future.set_result(replace(result, elapsed=0.01 * plan.num_tokens))
        return future

    monkeypatch.setattr(NullBackend, "execute", slowly)
    silent.run(300)
    assert told.num_run == silent.num_run
    # and nearly all that may run do
    assert told.num_run > 0.9 * 64 * 300


def test_the_taps_cost_is_measured_beside_what_it_tells_of() -> None:
    found = timeline_tap.measure(running=4, blocks=2, steps=60)
    assert 3.0 < found["running_mean"] <= 4.0
    # a step of few requests is cheap, so all that is known is that both cost something
    assert found["schedule_us"] > 0 and found["tap_us_per_step"] > 0
    assert found["feed_us_per_step"] > 0 and found["bytes_per_step"] > 60
