"""A request as a cascade gets it, and what stands where no model has a cascade.

NumPy is imported with the decision itself, so a gateway without cascades never loads it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from paceline.gateway.billing.spending import Spending
from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.proxy.context import NO_NOTE, Allowed
from paceline.gateway.requests.body import Body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.requests.prompt_size import PromptSize
from paceline.gateway.routing.routes import Endpoint, Route, Routes
from paceline.gateway.settings.config import GatewayConfig
from paceline.gateway.settings.prices import Used
from paceline.routing import Demand, HedgeBudget

__all__ = [
    "NO_CASCADES",
    "Answering",
    "Asked",
    "NoCascades",
    "Relaying",
    "Usage",
    "without_fallback",
]

Usage = Sequence[tuple[Endpoint, Used]]


class Asked(msgspec.Struct, frozen=True):
    """One request, as far as it was read."""

    incoming: IncomingRequest
    body: Body
    size: PromptSize
    # estimated tokens of the prompt
    tokens: float
    # route of the model that was asked for
    route: Route
    allowed: Allowed


def without_fallback(allowed: Allowed) -> Allowed:
    """Return the measures that are allowed while the large model may still answer: no calibration
    knows a later tier, or a model for spent budgets."""
    return Allowed(allowed.retry, False, allowed.resume, allowed.hedge)


class Relaying(Protocol):
    """The relaying of requests, and what is known of engines: ``Gateway``."""

    routes: Routes
    metrics: GatewayMetrics
    spending: Spending
    hedges: HedgeBudget
    config: GatewayConfig
    # it takes no new requests, and ends with the last one
    draining: bool
    now: Callable[[], float]

    async def relay(self, asked: Asked, note: Mapping[str, Any] = NO_NOTE) -> Usage:
        """Reserve what a request may use, relay it, settle, and return its usage."""
        ...

    def demand_of(self, asked: Asked) -> Demand: ...


# answers a request, by one model or both
Answering = Callable[[Asked], Awaitable[None]]


class NoCascades:
    """Cascades of a configuration without any."""

    def find(self, path: str, body: Body, route: Route) -> Answering | None:
        """Return what answers a request; None: it goes to its model as all others do."""
        return None

    async def close(self) -> None:
        """End what still runs for no caller."""

    def status(self) -> Mapping[str, Any]:
        """Return what each cascade has decided, by its model."""
        return {}

    def check(self) -> None:
        """Raise ConfigError if an engine has another model than a calibration was made with."""


NO_CASCADES: Final = NoCascades()
