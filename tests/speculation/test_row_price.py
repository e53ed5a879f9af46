"""What a row costs, below and above the knee of a machine."""

from __future__ import annotations

import random

import pytest

from paceline.speculation.row_price import RowPrice


def learned(
    knee: int, price: float, rows: list[int], noise: float = 0.0, unit: float = 1.0
) -> RowPrice:
    found, chance = RowPrice(), random.Random(3)
    for turn in range(480):
        count = rows[turn % len(rows)]
        seconds = 5.0 + price * max(0, count - knee)
        found.observe(count, unit * seconds * chance.lognormvariate(0.0, noise))
    return found


@pytest.mark.parametrize("knee", [1, 4, 7, 12])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_the_knee_and_the_price_behind_it(knee: int, noise: float, unit: float) -> None:
    price = learned(knee, 0.7, list(range(1, 25)), noise, unit)
    below, above = price.of(max(0, knee - 2)), price.of(knee + 3)
    assert below is not None and above is not None
    assert below == (pytest.approx(5.0 * unit, rel=0.05), 0.0 if knee > 1 else below[1])
    assert above == (
        pytest.approx((5.0 + 3 * 0.7) * unit, rel=0.05),
        pytest.approx(0.7 * unit, rel=0.15),
    )


def test_no_row_is_free_without_need() -> None:
    # all that was seen lies on one line: it may have its knee anywhere below
    price = learned(1, 1.0, [3, 4, 5]).of(1)
    assert price == (pytest.approx(5.0), pytest.approx(1.0))


def test_nothing_is_known_of_steps_that_are_alike() -> None:
    assert RowPrice().of(1) is None
    assert learned(4, 0.7, [1, 9]).of(1) is None


def test_a_machine_that_becomes_slower_is_followed() -> None:
    price = learned(4, 0.5, list(range(1, 17)))
    for turn in range(640):
        count = turn % 16 + 1
        price.observe(count, 10.0 + 1.0 * max(0, count - 4))
    found = price.of(10)
    assert found == (pytest.approx(16.0, rel=0.05), pytest.approx(1.0, rel=0.1))


def test_steps_of_hundreds_of_rows_do_not_decide_what_few_cost() -> None:
    price = learned(4, 0.7, list(range(1, 17)))
    for turn in range(640):
        # beyond some number a row costs much more
        price.observe(60 + turn % 196, 500.0 + 9.0 * (turn % 196))
    assert price.of(8) == (pytest.approx(7.8, rel=0.05), pytest.approx(0.7, rel=0.15))


def test_times_that_fall_with_rows_cost_nothing() -> None:
    assert learned(1, -0.1, list(range(1, 9))).of(4) == (pytest.approx(4.7, rel=0.1), 0.0)
