"""How much each key may ask for: requests and tokens per time, and requests at once."""

from paceline.server.rate_limits.limiter import (
    RateLimiter,
    Tally,
    Ticket,
    caller_of,
    current_ticket,
)
from paceline.server.rate_limits.rates import KeyLimits, Rate, parse_override

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
