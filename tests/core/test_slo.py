"""Targets: which of them a request missed, and which cannot be asked for."""

from __future__ import annotations

import pytest

from paceline.core.slo import NO_SLO, Slo
from paceline.errors import InvalidRequestError


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl", "deadline", "queue_ttl"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, 86_400.1, float("nan")])
def test_a_target_is_a_time_of_at_most_a_day(name: str, seconds: float) -> None:
    with pytest.raises(InvalidRequestError, match=rf"slo\.{name}_ms must be above 0 .* got") as no:
        Slo(**{name: seconds})
    assert no.value.param == f"slo.{name}_ms"
    assert getattr(Slo(**{name: 86_400.0}), name) == 86_400.0


def test_what_has_targets() -> None:
    assert not NO_SLO.has_targets
    for name in ("ttft", "tpot", "itl", "deadline"):
        assert Slo(best_effort=True, **{name: 1.0}).has_targets
    # how long it may wait is no target for its tokens
    assert not Slo(best_effort=True, queue_ttl=1.0).has_targets


def test_a_target_is_missed_by_more_and_not_by_as_much() -> None:
    slo = Slo(ttft=1.0, tpot=0.1, itl=0.5, deadline=3.0)
    # arrival 10, first token, last token, tokens, longest gap
    assert slo.violations(10.0, 11.0, 13.0, 21, 0.5) == ()
    assert slo.violations(10.0, 11.1, 12.0, 21, 0.5) == ("ttft",)
    assert slo.violations(10.0, 11.0, 13.0, 20, 0.5) == ("tpot",)
    assert slo.violations(10.0, 11.0, 13.0, 21, 0.6) == ("itl",)
    assert slo.violations(10.0, 11.0, 13.1, 30, 0.5) == ("deadline",)
    assert slo.violations(10.0, 12.0, 99.0, 2, 99.0) == ("ttft", "tpot", "itl", "deadline")
    assert slo.violations(10.0, 11.0, 11.0, 1) == (), "one token has no time per token"
    assert NO_SLO.violations(0.0, 9.0, 99.0, 2, 9.0) == ()
