"""Weights of tenants."""

from __future__ import annotations

from paceline.core.queues.fair_queue import TenantWeights


def test_who_is_not_named_weighs_one() -> None:
    weights = TenantWeights({"paid": 3.0, "free": 0.5})
    assert [weights.of(name) for name in ("paid", "free", "other")] == [3.0, 0.5, 1.0]


def test_sums_are_over_the_tenants_of_all_groups() -> None:
    weights = TenantWeights({"paid": 3.0, "free": 0.5, "away": 9.0})
    assert weights.sum_of({"paid", "x"}, ["free", "y", "z"]) == 3.0 + 1.0 + 0.5 + 2.0
    assert weights.sum_of() == weights.sum_of([], ()) == 0.0


def test_later_changes_of_what_it_was_made_of_do_not_reach_it() -> None:
    given = {"paid": 3.0}
    weights = TenantWeights(given)
    given["paid"] = 1.0
    assert weights.of("paid") == 3.0
