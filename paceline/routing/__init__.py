"""Which engine gets a request: engines as values in, a choice out.

Used by ``sim`` in virtual time; whatever forwards requests to live engines uses the same classes.
Imports ``core`` for its errors alone.
"""

from paceline.routing.routers import (
    ROUTERS,
    LeastOutstanding,
    PrefixAffinity,
    RoundRobin,
    Router,
    make_router,
)

__all__ = [
    "ROUTERS",
    "LeastOutstanding",
    "PrefixAffinity",
    "RoundRobin",
    "Router",
    "make_router",
]
