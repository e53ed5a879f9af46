"""Limits of each key: requests and tokens per time, and requests at once."""

from paceline.http.rate_limits.limiter import (
    Hold,
    RateLimiter,
    Tally,
    Ticket,
    caller_of,
    current_ticket,
)
from paceline.http.rate_limits.rates import KeyLimits, Rate, Want, parse_override

__all__ = [
    "Hold",
    "KeyLimits",
    "Rate",
    "RateLimiter",
    "Tally",
    "Ticket",
    "Want",
    "caller_of",
    "current_ticket",
    "parse_override",
]
