"""Rates as text, and the arithmetic of a sliding window against its definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.http.rate_limits.rates import (
    KeyLimits,
    Rate,
    Window,
    go_duration,
    parse_override,
)


@pytest.mark.parametrize(
    ("text", "amount", "seconds"),
    [
        ("60/minute", 60, 60),
        ("1/second", 1, 1),
        ("5/10s", 5, 10),
        ("100000/day", 100_000, 86400),
        ("7/2hour", 7, 7200),
        ("7/90m", 7, 5400),
    ],
)
def test_rates_are_read(text: str, amount: int, seconds: int) -> None:
    assert Rate.parse(text) == Rate(amount, seconds)
    assert Rate.parse(str(Rate.parse(text))) == Rate(amount, seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "60",
        "60/",
        "/minute",
        "0/minute",
        "-1/minute",
        "6e3/minute",
        "60/fortnight",
        "60/0s",
        "1.5/s",
        "60/minute;5/s",
        "9999999999999999999/s",
        "1/999999day",
        "٣/s",
    ],
)
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Rate.parse(text)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("requests=60/minute", ("requests", Rate(60, 60))),
        ("tokens=unlimited", ("tokens", None)),
        ("concurrent=4", ("concurrent", 4)),
        ("concurrent=unlimited", ("concurrent", None)),
    ],
)
def test_limits_of_a_key(word: str, expected: object) -> None:
    assert parse_override(word) == expected


@pytest.mark.parametrize(
    "word", ["requests", "requests=", "tokens=x", "concurrent=0", "concurrent=1/s", "speed=1/s"]
)
def test_other_limits_of_a_key_are_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(word)


def test_nothing_is_no_limit() -> None:
    assert not KeyLimits() and KeyLimits(concurrent=1)
    with pytest.raises(ConfigError, match="got 0"):
        KeyLimits(concurrent=0)


def later(window: Window, seconds: float) -> Window:
    """The same window after some time in which nobody asked."""
    length = window.rate.seconds
    if seconds < window.rolls_in:
        left = max(0.0, window.previous_left - seconds)
        return Window(window.rate, window.previous, left, window.current, window.rolls_in - seconds)
    left = max(0.0, length - (seconds - window.rolls_in))
    return Window(window.rate, window.current, left, 0, length)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    rate = Rate(draw(st.integers(1, 1000)), draw(st.integers(1, 100)))
    rolls_in = draw(st.floats(0.01, 1.0)) * rate.seconds
    # the previous window leaves as the current one ends
    return Window(
        rate, draw(st.integers(0, rate.amount)), rolls_in, draw(st.integers(0, 1000)), rolls_in
    )


@given(windows(), st.integers(1, 1000))
def test_the_advised_wait_is_enough_and_not_too_long(window: Window, cost: int) -> None:
    assume(cost <= window.rate.amount)
    wait = window.retry_after(cost)
    assert 0 <= wait <= window.rolls_in + window.rate.seconds
    # what is advised goes out in whole seconds
    assert later(window, wait + 1e-3).used + cost <= window.rate.amount
    if wait > 0.01:
        assert later(window, wait - 0.01).used + cost > window.rate.amount


@given(windows())
def test_after_the_reset_all_is_there(window: Window) -> None:
    reset = window.reset_after
    assert later(window, reset + 1e-6).remaining == window.rate.amount
    assert window.remaining == max(0, window.rate.amount - window.used)
    if window.current:
        assert not math.isclose(reset, 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0204, "21ms"),
        (1.5, "1.5s"),
        (59.999, "59.999s"),
        (60.0, "1m0s"),
        (360.0, "6m0s"),
        (3723.2, "1h2m4s"),
    ],
)
def test_durations_are_gos(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text
