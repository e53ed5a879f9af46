"""A second engine for a first token that is late: whether, when and which.

::

    first engine   sent ...................... (late) ............ says nothing yet
    second engine                              sent ..... first word: it has won
    caller                                                ^ reads the second one's, whole

What the second one says is kept back until it has said something; then the other one is dropped.
Nothing of both is ever mixed. It costs an attempt of the request's and one of the budget that all
further attempts are paid from.
"""

from __future__ import annotations

from paceline.gateway.attempts import Attempts
from paceline.gateway.bodies import Body
from paceline.gateway.config import GatewayConfig
from paceline.gateway.leg import Leg
from paceline.gateway.pick import Pick, Picker
from paceline.gateway.routes import Site
from paceline.http.errors import HttpError
from paceline.routing import Demand, HedgeBudget, hedge_delay, is_worth_it, saturation

__all__ = ["Hedge"]


class Hedge:
    """Of one streamed request. Seconds of a clock that never goes back are an argument."""

    def __init__(
        self,
        config: GatewayConfig,
        budget: HedgeBudget,
        picker: Picker,
        attempts: Attempts,
        demand: Demand,
        body: Body,
    ) -> None:
        self._config, self._budget, self._picker = config, budget, picker
        self._attempts, self._demand = attempts, demand
        # work that can wait, and answers that would be paid for several times, are not hedged
        self._wanted = bool(config.hedge_share) and not body.slo.best_effort and body.n == 1
        self._due_at: float | None = None
        self._sent_at = 0.0
        # the second engine's, while both run
        self.spare: Leg | None = None

    def arm(self, pick: Pick, now: float) -> None:
        """The first attempt is sent."""
        if self._wanted:
            self._budget.deposit()
            delay = hedge_delay(pick.site.engine.load, pick.view, self._config.hedge_after)
            self._sent_at = now
            self._due_at = None if delay is None else now + delay

    def disarm(self) -> None:
        """It has said something, or is over."""
        self._due_at = None

    def is_due(self, now: float) -> bool:
        return self._due_at is not None and now >= self._due_at

    def pick(self, first: Site, now: float) -> Pick | None:
        """The second engine, paid for; None: it is not to be."""
        self._due_at = None
        if not self._budget.has_one:
            return None
        route = self._attempts.route
        tier = next(sites for sites in route.tiers if first in sites)
        try:
            pick = self._picker.pick(
                route,
                self._demand,
                now,
                tried={*self._attempts.tried, first.engine.name},
                only=lambda site: site in tier and site.model == first.model,
            )
        except HttpError:
            return None
        places = [pick.site, *(site for site in tier if site is not pick.site)]
        full = [
            saturation(site.engine.load, site.engine.places_in_all, now)
            for site in places
            if not site.engine.usable(now)
        ]
        waited = now - self._sent_at
        below = self._config.hedge_below
        if not is_worth_it(self._demand, waited, pick.view, full, below):
            return None
        if not self._attempts.may_hedge(now):
            return None
        self._budget.take()
        return pick
