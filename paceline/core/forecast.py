"""The forecast of a request's time to first token, kept until the outcome is known."""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.tier import Tier

__all__ = ["Forecast", "ForecastKind"]


class ForecastKind(NamedTuple):
    """Kind of requests, whose forecasts share one bias."""

    tier: Tier
    priority: int
    boosted: bool
    # the first token is predicted to be late, so that the request yields
    late: bool


class Forecast(NamedTuple):
    """Forecast of the seconds from arrival to first token, without the bias of its kind."""

    kind: ForecastKind
    seconds: float
    # the same without overtakers; seconds that they add for each second of the wait, and how long
    alone: float
    overtaken: float
    overtaken_for: float
