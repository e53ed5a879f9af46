"""Choice of an engine for a request, and limits on attempts: values in, decisions out.

``sim`` uses it in virtual time, and ``gateway`` in front of live engines. It imports only the
errors of ``core``, and knows neither clocks nor sockets.
"""

from paceline.routing.breaker import Breaker, BreakerSettings, BreakerState
from paceline.routing.choice import choose
from paceline.routing.engine_load import Demand, Dispatch, EngineLoad, EngineView, Pressure
from paceline.routing.handing import HandOvers, Role
from paceline.routing.hedging import HedgeBudget, hedge_delay, is_worth_it, saturation
from paceline.routing.pace import TRICKLE, Pace, SlowStart, slow_ones
from paceline.routing.predicted import PredictedRouter
from paceline.routing.prefixes import hash_chain, prefix_chain
from paceline.routing.retry_budget import RetryBudget
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
    "TRICKLE",
    "Breaker",
    "BreakerSettings",
    "BreakerState",
    "Demand",
    "Dispatch",
    "EngineLoad",
    "EngineView",
    "HandOvers",
    "HedgeBudget",
    "LeastOutstanding",
    "Pace",
    "PredictedRouter",
    "PrefixAffinity",
    "Pressure",
    "RetryBudget",
    "Role",
    "RoundRobin",
    "Router",
    "SlowStart",
    "choose",
    "hash_chain",
    "hedge_delay",
    "is_worth_it",
    "make_router",
    "prefix_chain",
    "saturation",
    "slow_ones",
]
