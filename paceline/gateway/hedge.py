"""A second engine for a first token that is late: whether, when and which, and what becomes of it.

::

    first engine   sent ...................... (late) ............ says nothing yet
    second engine                              sent ..... first word: it has won
    caller                                                ^ reads the second one's, whole

What the second one says is kept back until it has said something; then the other one is dropped.
Nothing of both is ever mixed. It costs an attempt of the request's and one of the budget that all
further attempts are paid from.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import RequestError
from paceline.gateway.attempts import Attempts
from paceline.gateway.bodies import Body
from paceline.gateway.config import GatewayConfig
from paceline.gateway.counts import Counts
from paceline.gateway.leg import Leg, Owner
from paceline.gateway.pick import Pick, Picker
from paceline.gateway.routes import Site
from paceline.gateway.sending import Sending
from paceline.gateway.splice import Splice
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
        sending: Sending,
        counts: Counts,
    ) -> None:
        self._config, self._budget, self._picker = config, budget, picker
        self._attempts, self._demand = attempts, demand
        self._sending, self._counts = sending, counts
        # work that can wait, and answers that would be paid for several times, are not hedged
        self.is_wanted = bool(config.hedge_share) and not body.slo.best_effort and body.n == 1
        self._due_at: float | None = None
        self._sent_at = 0.0
        # the second engine's, while both run
        self._spare: Leg | None = None

    @property
    def spare(self) -> Leg | None:
        """The second engine's leg, while both run."""
        return self._spare

    def arm(self, pick: Pick, now: float) -> None:
        """The first attempt is made."""
        if self.is_wanted:
            self._budget.deposit()
            delay = hedge_delay(pick.site.engine.load, pick.view, self._config.hedge_after)
            self._sent_at = now
            self._due_at = None if delay is None else now + delay

    def is_due(self, now: float) -> bool:
        return self._due_at is not None and now >= self._due_at

    def ask(self, first: Site, owner: Owner, path: str, probe: Callable[[], Splice]) -> bool:
        """Send it to a second engine, if there is one for it; whether it was.

        Args:
            owner: of the leg there.
            probe: makes a splice that what it says is tried on.
        """
        now = owner.now()
        pick = self._pick(first, now)
        if pick is None:
            return False
        site = pick.site
        try:
            request = self._sending.request(site, resumed=False)
        except RequestError:
            # what cannot be said in the second engine's API is no trouble of the first one's, and
            # what is not sent is not paid for
            return False
        if not self._attempts.may_hedge(now):
            return False
        self._budget.take()
        self._attempts.num += 1
        dispatch = site.engine.load.dispatch(self._demand, pick.view, now)
        self._spare = Leg(owner, site, dispatch, probe=probe())
        self._counts.attempt(site, resumed=False, fallback=False)
        self._spare.send(path, request)
        return True

    def first_spoke(self) -> None:
        """The first engine has said something: the second one is not needed any more."""
        self._due_at = None
        spare, self._spare = self._spare, None
        if spare is not None:
            self._counts.hedged(spare.site, "lost")
            spare.abandon()

    def second_failed(self) -> Leg | None:
        """The second one's leg, once, if it has failed while the first one has not answered."""
        spare = self._spare
        if spare is None or spare.verdict is None or spare.is_answer:
            return None
        self._spare = None
        self._counts.hedged(spare.site, "failed")
        return spare

    @property
    def second_answered(self) -> bool:
        """Whether the second one gave its answer whole, and not as a stream."""
        return self._spare is not None and self._spare.is_answer

    def take(self, *, won: bool) -> Leg:
        """The second one's leg is the request's own from here on.

        Args:
            won: it spoke first; else the first engine has failed.
        """
        spare, self._spare = self._spare, None
        assert spare is not None, "there are two"
        if won:
            self._counts.hedged(spare.site, "won")
        return spare

    def end(self) -> None:
        """The attempt is over."""
        self._due_at = None
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.abandon()

    def _pick(self, first: Site, now: float) -> Pick | None:
        """The second engine; None: it is not to be."""
        self._due_at = None
        if not (self._budget.has_one and self._attempts.may_hedge(now, peek=True)):
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
            if not site.usable(now, route.path)
        ]
        waited = now - self._sent_at
        below = self._config.hedge_below
        if not is_worth_it(self._demand, waited, pick.view, full, below):
            return None
        return pick
