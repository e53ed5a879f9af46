"""Further attempts stay a share of the requests."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.routing import RetryBudget


def test_a_steady_failure_multiplies_load_by_the_share_alone() -> None:
    budget = RetryBudget(share=0.2, per_second=1.0, memory=10.0)
    now, taken, requests = 0.0, 0, 0
    while now < 60.0:
        budget.deposit(now)
        requests += 1
        taken += budget.take(now)
        now += 0.01
    # the floor, and what it held at the start
    assert taken <= 0.2 * requests + 60.0 + 10.0
    assert taken >= 0.15 * requests


def test_a_quiet_gateway_may_retry() -> None:
    budget = RetryBudget(share=0.2, per_second=5.0)
    assert budget.left(0.0) == pytest.approx(50.0)
    for _ in range(50):
        assert budget.take(0.0)
    assert not budget.take(0.0)
    assert budget.take(0.21) and not budget.take(0.21)


def test_overdrawing_is_for_one_more() -> None:
    budget = RetryBudget(share=0.0, per_second=0.1, memory=10.0)
    assert budget.take(0.0) and not budget.take(0.0)
    assert budget.take(0.0, overdraw=True) and not budget.take(0.0, overdraw=True)
    assert budget.left(0.0) == 0.0


def test_bad_values() -> None:
    with pytest.raises(ConfigError, match="share"):
        RetryBudget(share=-1.0)
