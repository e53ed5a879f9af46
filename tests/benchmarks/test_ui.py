"""The page's benchmark says what it measured, and whether that is as it should be."""

from __future__ import annotations

from benchmarks import timeline_tap
from benchmarks.ui import first_visit, judged


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


def test_the_taps_cost_is_measured_beside_what_it_tells_of() -> None:
    found = timeline_tap.measure(running=4, blocks=2, steps=60)
    # a step of few requests is cheap, so all that is known is that both cost something
    assert found["schedule_us"] > 0 and found["tap_us_per_step"] > 0
    assert found["feed_us_per_step"] > 0 and found["bytes_per_step"] > 60
