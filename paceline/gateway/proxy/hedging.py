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

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import RequestError
from paceline.gateway.proxy.attempt import Attempt, AttemptOwner
from paceline.gateway.proxy.context import RequestContext
from paceline.gateway.proxy.placement import Placement
from paceline.gateway.proxy.upstream_request import UpstreamRequest
from paceline.gateway.routing.picker import Pick
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.streams.openai_stream import StreamRelay
from paceline.http.errors import HttpError
from paceline.routing import hedge_delay, is_worth_it, saturation

__all__ = ["Hedge"]


@dataclass(frozen=True, slots=True)
class Change:
    """What changed while two attempts run, or may run, at once."""

    # the hedge was sent
    sent: bool = False
    # attempt that failed, while the other one goes on
    failed: Attempt | None = None
    # the hedge, if it answers the request from now on
    answers: Attempt | None = None


@dataclass(slots=True, eq=False)
class Hedge:
    """The hedge of one streamed request. Times are arguments, in seconds of a monotonic clock."""

    context: RequestContext
    placement: Placement
    upstream_request: UpstreamRequest
    # time at which the first attempt counts as late; None: never, or a hedge was decided on
    _due_at: float | None = None
    # time at which the first attempt was sent
    _sent_at: float = 0.0
    # the second attempt, while both run
    spare: Attempt | None = None

    def arm(self, pick: Pick, now: float) -> None:
        """Set the time at which the first attempt counts as late."""
        context = self.context
        context.hedge_budget.deposit()
        delay = hedge_delay(pick.endpoint.upstream.load, pick.view, context.config.hedge_after)
        self._sent_at = now
        self._due_at = None if delay is None else now + delay

    def is_due(self, now: float) -> bool:
        return self._due_at is not None and now >= self._due_at

    def check(
        self, first: Attempt, owner: AttemptOwner, new_relay: Callable[[], StreamRelay]
    ) -> Change:
        """Send the hedge if it is due; decide which attempt goes on if one has failed, or if the
        second engine has sent its answer in one piece instead of a stream.

        Args:
            first: the attempt that answers so far.
            owner: owner of the second attempt.
            new_relay: makes a relay that watches the second engine's output for a token.
        """
        sent = self.is_due(self.context.now()) and self._send(first.endpoint, owner, new_relay)
        spare, verdict = self.spare, first.verdict
        if spare is None:
            return Change(sent)
        if spare.verdict is not None and not spare.is_answer:
            self.spare = None
            self.context.metrics.hedged(spare.endpoint, "failed")
            return Change(sent, failed=spare)
        if verdict is not None and verdict.kind != "done" and not first.is_final:
            return Change(sent, failed=first, answers=self.take(won=spare.is_answer))
        if spare.is_answer and verdict is None:
            first.abandon()
            return Change(sent, answers=self.take(won=True))
        return Change(sent)

    def _send(
        self, first: Endpoint, owner: AttemptOwner, new_relay: Callable[[], StreamRelay]
    ) -> bool:
        """Send the request to a second engine, if there is one for it; return whether it was
        sent."""
        context = self.context
        now = context.now()
        pick = self._pick(first, now)
        if pick is None:
            return False
        endpoint = pick.endpoint
        try:
            request = self.upstream_request.encode(endpoint, resumed=False)
        except RequestError:
            # the second engine's API cannot express the request: that does not concern the first
            # attempt, and nothing is paid for it
            return False
        if not self.placement.may_hedge(now):
            return False
        context.hedge_budget.take()
        self.placement.note_sent()
        dispatch = endpoint.upstream.load.dispatch(context.demand, pick.view, now)
        self.spare = Attempt(owner, endpoint, dispatch, hedge_relay=new_relay())
        context.metrics.attempt(endpoint, resumed=False, fallback=False)
        self.spare.send(request)
        return True

    def first_spoke(self) -> None:
        """Abandon the hedge: the first engine has answered."""
        self._due_at = None
        spare, self.spare = self.spare, None
        if spare is not None:
            self.context.metrics.hedged(spare.endpoint, "lost")
            spare.abandon()

    def take(self, *, won: bool) -> Attempt:
        """Return the second attempt, to answer the request from now on.

        Args:
            won: it answered first; False: the first engine failed.
        """
        spare, self.spare = self.spare, None
        assert spare is not None, "there are two"
        if won:
            self.context.metrics.hedged(spare.endpoint, "won")
        return spare

    def end(self) -> None:
        """Abandon the hedge, as the attempt is over."""
        self._due_at = None
        spare, self.spare = self.spare, None
        if spare is not None:
            spare.abandon()

    def _pick(self, first: Endpoint, now: float) -> Pick | None:
        """Choose the second engine; None: no hedge is sent."""
        self._due_at = None
        context, placement = self.context, self.placement
        if not (context.hedge_budget.has_one and placement.may_hedge(now, peek=True)):
            return None
        try:
            pick = placement.pick_second(first, now)
        except HttpError:
            return None
        tier = placement.tier_of(first)
        candidates = [
            pick.endpoint,
            *(endpoint for endpoint in tier if endpoint is not pick.endpoint),
        ]
        full = [
            saturation(
                endpoint.upstream.load, endpoint.upstream.config.max_concurrent or math.inf, now
            )
            for endpoint in candidates
            if not endpoint.usable(now, context.path)
        ]
        waited = now - self._sent_at
        below = context.config.hedge_below
        return pick if is_worth_it(context.demand, waited, pick.view, full, below) else None
