"""A breaker opens on failures, admits one probe at a time, and closes on successes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.errors import ConfigError
from paceline.routing import Breaker, BreakerSettings


def failing(breaker: Breaker, count: int, now: float = 0.0) -> None:
    for _ in range(count):
        breaker.begin(now)
        breaker.fail(now)


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    failing(breaker, 4)
    assert breaker.state(0.0) == "closed"
    breaker.begin(0.0)
    breaker.succeed(0.0)
    failing(breaker, 4)
    assert breaker.allows(0.0)
    failing(breaker, 1)
    assert breaker.state(4.9) == "open" and not breaker.allows(4.9)
    assert breaker.reopens_in(1.0) == pytest.approx(4.0)


def test_half_open_admits_one_and_wants_two_successes() -> None:
    breaker = Breaker()
    failing(breaker, 5)
    assert breaker.allows(5.0) and breaker.state(5.0) == "half-open"
    breaker.begin(5.0)
    assert not breaker.allows(5.0)
    breaker.succeed(5.1)
    assert breaker.state(5.2) == "half-open" and breaker.allows(5.2)
    breaker.begin(5.2)
    breaker.succeed(5.3)
    assert breaker.state(5.4) == "closed" and breaker.num_opened == 1


def test_streams_from_before_do_not_keep_probes_away() -> None:
    breaker = Breaker()
    breaker.begin(0.0)
    failing(breaker, 5)
    assert breaker.allows(5.0)


def test_each_time_it_stays_open_longer() -> None:
    breaker = Breaker()
    failing(breaker, 5)
    failing(breaker, 1, 5.0)
    assert breaker.reopens_in(5.0) == pytest.approx(10.0)
    failing(breaker, 1, 15.0)
    assert breaker.reopens_in(15.0) == pytest.approx(20.0)
    for now in (35.0, 75.0, 135.0):
        failing(breaker, 1, now)
    assert breaker.reopens_in(135.0) == pytest.approx(60.0)


def test_what_was_sent_before_does_not_shorten_it() -> None:
    breaker = Breaker()
    for _ in range(8):
        breaker.begin(0.0)
    for _ in range(8):
        breaker.fail(1.0)
    assert breaker.reopens_in(1.0) == pytest.approx(5.0)


def test_a_share_of_the_window_opens_it() -> None:
    breaker = Breaker()
    for number in range(12):
        breaker.begin(0.1 * number)
        # two of three fail, never five in a row
        (breaker.succeed if number % 3 == 0 else breaker.fail)(0.1 * number)
    assert breaker.state(1.2) == "open"
    calm = Breaker()
    for number in range(40):
        calm.begin(4.0 * number)
        # as many failures, over a long time
        (calm.succeed if number % 2 == 0 else calm.fail)(4.0 * number)
    assert calm.state(160.0) == "closed"


@pytest.mark.parametrize(
    "fields", [{"max_failures": 0}, {"max_failure_share": 0.0}, {"open_seconds": 99.0}]
)
def test_bad_settings(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        BreakerSettings(**fields)  # type: ignore[arg-type]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now = 0.0
        self.sent = 0
        self.probes = 0

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        before = self.breaker.reopens_in(self.now)
        self.now += seconds
        assert self.breaker.reopens_in(self.now) == pytest.approx(
            max(0.0, before - seconds), abs=1e-6
        )

    @precondition(lambda self: self.breaker.allows(self.now))
    @rule()
    def send(self) -> None:
        self.breaker.begin(self.now)
        self.sent += 1

    @precondition(lambda self: self.sent)
    @rule(good=st.booleans())
    def end(self, good: bool) -> None:
        left = self.breaker.reopens_in(self.now)
        (self.breaker.succeed if good else self.breaker.fail)(self.now)
        self.sent -= 1
        if self.breaker.state(self.now) == "open":
            assert self.breaker.reopens_in(self.now) >= left

    @precondition(lambda self: self.sent)
    @rule()
    def abandon(self) -> None:
        state = self.breaker.state(self.now)
        self.breaker.abandon()
        self.sent -= 1
        assert self.breaker.state(self.now) == state

    @invariant()
    def open_admits_nobody(self) -> None:
        if self.breaker.state(self.now) == "open":
            assert not self.breaker.allows(self.now)
        if self.breaker.state(self.now) == "closed":
            assert self.breaker.allows(self.now)


TestMachine = Machine.TestCase
