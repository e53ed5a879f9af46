"""Admission of a request: what it may use is reserved in its key's budget and rate limits, and
settled once the request has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from paceline.gateway.billing.budgets import NOTHING
from paceline.gateway.billing.reserving import Plan
from paceline.gateway.billing.spending import Charge, Spending
from paceline.gateway.requests.body import Body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.routing.routes import Endpoint, Route
from paceline.gateway.settings.prices import Used
from paceline.http.rate_limits.limiter import Hold, RateLimiter

__all__ = ["Admission", "Admitted", "tokens_of"]


class Admitted(msgspec.Struct, frozen=True):
    """A request whose use is reserved."""

    charge: Charge
    # None: no rate limit applies
    hold: Hold | None
    # the body, whose answers are capped to what was reserved
    body: Body


class Admission:
    """Admission at one gateway.

    Args:
        limiter: None: no key has a limit.
    """

    def __init__(self, spending: Spending, limiter: RateLimiter | None) -> None:
        self._spending, self._limiter = spending, limiter

    async def admit(
        self,
        incoming: IncomingRequest,
        route: Route,
        body: Body,
        plan: Callable[[Route], Plan],
        other: Callable[[str], Route] | None,
    ) -> Admitted:
        """Reserve what a request may use. The result must be passed to ``settle``.

        Args:
            plan: its use on a given route.
            other: the route of another model; None: the caller wants no other model.

        Raises:
            HttpError: 402 or 429, its key has spent its budget, or has reached a limit.
        """
        if self._spending.is_free and incoming.ticket is None:
            return Admitted(Charge(NOTHING, route), None, body)
        charge = await self._spending.reserve(incoming.tenant, route, plan, other)
        hold: Hold | None = None
        try:
            if charge.granted is not None and charge.plan is not None:
                body = charge.plan.capped(body, charge.granted)
            if incoming.ticket is not None and self._limiter is not None:
                planned = charge.plan or plan(charge.route)
                hold = await self._limiter.hold(incoming.ticket, planned.tokens())
                if hold.window is not None:
                    body = planned.capped(body, planned.granted(hold.tokens.__sub__))
        except BaseException:
            await self.settle(Admitted(charge, hold, body), ())
            raise
        return Admitted(charge, hold, body)

    async def settle(self, admitted: Admitted, usage: Sequence[tuple[Endpoint, Used]]) -> None:
        """Settle a request that has ended; ``usage``: by endpoint, empty without an answer."""
        self._spending.settle(admitted.charge, usage)
        if admitted.hold is not None and self._limiter is not None:
            await self._limiter.settle(admitted.hold, tokens_of(usage))


def tokens_of(usage: Sequence[tuple[Endpoint, Used]]) -> int:
    """Return the tokens of a usage, of prompt and output."""
    return sum(used.prompt + used.output for _, used in usage)
