"""Hedging: a second engine is asked if the first token is late.

::

    first engine   sent ...................... (late) ............ nothing yet
    second engine                              sent ..... first token: it wins
    caller                                                ^ gets the second answer, from its start

The second engine's output is held back until it holds a token; then the first attempt is dropped,
so output of both is never mixed. A hedge counts as an attempt of the request, and draws on the
budget that pays for retries.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import RequestError
from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.proxy.attempt import Attempt, AttemptOwner
from paceline.gateway.proxy.retry_state import RetryState
from paceline.gateway.proxy.upstream_request import UpstreamRequest
from paceline.gateway.requests.body import Body
from paceline.gateway.routing.picker import Pick, Picker
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.config import GatewayConfig
from paceline.gateway.streams.openai_stream import StreamRelay
from paceline.http.errors import HttpError
from paceline.routing import Demand, HedgeBudget, hedge_delay, is_worth_it, saturation

__all__ = ["Hedge"]


class Hedge:
    """The hedge of one streamed request. Times are arguments, in seconds of a monotonic clock."""

    def __init__(
        self,
        config: GatewayConfig,
        budget: HedgeBudget,
        picker: Picker,
        retries: RetryState,
        demand: Demand,
        body: Body,
        upstream_request: UpstreamRequest,
        metrics: GatewayMetrics,
    ) -> None:
        self._config, self._budget, self._picker = config, budget, picker
        self._retries, self._demand = retries, demand
        self._upstream_request, self._metrics = upstream_request, metrics
        # no hedge for work that can wait, nor for answers that would be paid for several times
        self.is_wanted = bool(config.hedge_share) and not body.slo.best_effort and body.n == 1
        self._due_at: float | None = None
        self._sent_at = 0.0
        # the second attempt, while both run
        self._spare: Attempt | None = None

    @property
    def spare(self) -> Attempt | None:
        """The second attempt, while both run."""
        return self._spare

    def arm(self, pick: Pick, now: float) -> None:
        """Set the time at which the first attempt counts as late."""
        if self.is_wanted:
            self._budget.deposit()
            delay = hedge_delay(pick.endpoint.upstream.load, pick.view, self._config.hedge_after)
            self._sent_at = now
            self._due_at = None if delay is None else now + delay

    def is_due(self, now: float) -> bool:
        return self._due_at is not None and now >= self._due_at

    def send(
        self, first: Endpoint, owner: AttemptOwner, path: str, new_relay: Callable[[], StreamRelay]
    ) -> bool:
        """Send the request to a second engine, if there is one for it; return whether it was sent.

        Args:
            owner: owner of the second attempt.
            new_relay: makes a relay that watches the second engine's output for a token.
        """
        now = owner.now()
        pick = self._pick(first, now)
        if pick is None:
            return False
        endpoint = pick.endpoint
        try:
            request = self._upstream_request.encode(endpoint, resumed=False)
        except RequestError:
            # the second engine's API cannot express the request: that does not concern the first
            # attempt, and nothing is paid for it
            return False
        if not self._retries.may_hedge(now):
            return False
        self._budget.take()
        self._retries.num += 1
        dispatch = endpoint.upstream.load.dispatch(self._demand, pick.view, now)
        self._spare = Attempt(owner, endpoint, dispatch, hedge_relay=new_relay())
        self._metrics.attempt(endpoint, resumed=False, fallback=False)
        self._spare.send(path, request)
        return True

    def first_spoke(self) -> None:
        """Abandon the hedge: the first engine has answered."""
        self._due_at = None
        spare, self._spare = self._spare, None
        if spare is not None:
            self._metrics.hedged(spare.endpoint, "lost")
            spare.abandon()

    def second_failed(self) -> Attempt | None:
        """Return the second attempt, once, if it failed before the first engine answered."""
        spare = self._spare
        if spare is None or spare.verdict is None or spare.is_answer:
            return None
        self._spare = None
        self._metrics.hedged(spare.endpoint, "failed")
        return spare

    @property
    def second_answered(self) -> bool:
        """Whether the second engine sent its answer in one piece instead of a stream."""
        return self._spare is not None and self._spare.is_answer

    def take(self, *, won: bool) -> Attempt:
        """Return the second attempt, to answer the request from now on.

        Args:
            won: it answered first; False: the first engine failed.
        """
        spare, self._spare = self._spare, None
        assert spare is not None, "there are two"
        if won:
            self._metrics.hedged(spare.endpoint, "won")
        return spare

    def end(self) -> None:
        """Abandon the hedge, as the attempt is over."""
        self._due_at = None
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.abandon()

    def _pick(self, first: Endpoint, now: float) -> Pick | None:
        """Choose the second engine; None: no hedge is sent."""
        self._due_at = None
        if not (self._budget.has_one and self._retries.may_hedge(now, peek=True)):
            return None
        route = self._retries.route
        tier = next(endpoints for endpoints in route.tiers if first in endpoints)
        try:
            pick = self._picker.pick(
                route,
                self._demand,
                now,
                tried={*self._retries.tried, first.upstream.name},
                only=lambda endpoint: endpoint in tier and endpoint.model == first.model,
            )
        except HttpError:
            return None
        candidates = [
            pick.endpoint,
            *(endpoint for endpoint in tier if endpoint is not pick.endpoint),
        ]
        full = [
            saturation(endpoint.upstream.load, endpoint.upstream.max_slots, now)
            for endpoint in candidates
            if not endpoint.usable(now, route.path)
        ]
        waited = now - self._sent_at
        below = self._config.hedge_below
        if not is_worth_it(self._demand, waited, pick.view, full, below):
            return None
        return pick
