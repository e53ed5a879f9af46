"""Scores of other traffic are seen without right answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.routing.cascade import Drift
from paceline.routing.cascade.drift import distance

samples = st.lists(st.sampled_from([i / 8 for i in range(9)]), min_size=1, max_size=30)


@given(samples, samples)
def test_the_distance_is_the_largest_difference_of_shares(
    one: list[float], other: list[float]
) -> None:
    def share(values: list[float], point: float) -> float:
        return sum(value <= point for value in values) / len(values)

    found = max(abs(share(one, p) - share(other, p)) for p in (*one, *other))
    assert distance(np.array(one), np.array(other)) == pytest.approx(found)
    assert distance(np.array(one), np.array(one)) == 0.0


def test_it_is_told_now_and_then_and_grows_with_other_traffic() -> None:
    draw = np.random.default_rng(0)
    drift = Drift(draw.random(300).tolist())
    told = []
    for scores in (draw.random(200), 0.4 * draw.random(200)):
        for score in scores:
            drift.saw(float(score))
            if (found := drift.take()) is not None:
                told.append(found)
    assert len(told) == 7 and max(told[:3]) < 0.2 < 0.5 < told[-1]
