"""How much each key may ask for: requests and tokens per time, and requests at once."""

from paceline.http.rate_limits.limiter import (
    RateLimiter,
    Tally,
    Ticket,
    caller_of,
    current_ticket,
)
from paceline.http.rate_limits.rates import KeyLimits, Rate, parse_override

__all__ = [
    "KeyLimits",
    "Rate",
    "RateLimiter",
    "Tally",
    "Ticket",
    "caller_of",
    "current_ticket",
    "parse_override",
]
