"""Retries of one request: the attempts that were made, where, and whether another is allowed.

One budget pays for every attempt after a request's first, and ``max_attempts`` bounds the attempts
of a request, over all tiers and for whatever reason they are made.
"""

from __future__ import annotations

import math

from paceline.gateway.proxy.caller import Allowed
from paceline.gateway.proxy.upstream_request import UpstreamRequest
from paceline.gateway.routing.picker import Pick, Picker, Tried
from paceline.gateway.routing.routes import Endpoint, Route
from paceline.gateway.settings.config import GatewayConfig
from paceline.gateway.streams.openai_stream import StreamRelay
from paceline.routing import Demand, RetryBudget

__all__ = ["RetryState"]


class RetryState:
    """State of one request's retries. Times are arguments, in seconds of a monotonic clock.

    Args:
        relay: relay of the streamed answer; None: it is not streamed.
    """

    def __init__(
        self,
        config: GatewayConfig,
        picker: Picker,
        budget: RetryBudget,
        route: Route,
        demand: Demand,
        allowed: Allowed,
        upstream_request: UpstreamRequest,
        relay: StreamRelay | None,
    ) -> None:
        self._config, self._picker, self._budget = config, picker, budget
        self._demand, self._allowed, self._upstream_request = demand, allowed, upstream_request
        self._relay = relay
        self.route = route
        self.tried: set[str | tuple[str, str]] = set()
        # requests sent; continuations of a stream among them; and those that were lost
        self.num = 0
        self.num_resumes = 0
        self.num_lost = 0
        # longest context, in tokens, that was too short for the prompt
        self._needs_more: float | None = None

    @property
    def _goes_on(self) -> bool:
        return self._relay is not None and self._relay.emitted

    def pick(self, now: float, last: Endpoint | None) -> Pick:
        """Pick an engine that was not tried. Raises as ``Picker.pick``; ``last``: endpoint of the
        attempt before."""
        only = None if self._needs_more is None else self._is_long_enough
        if self._goes_on:
            assert last is not None, "somebody said what was emitted"

            def exactly(endpoint: Endpoint) -> bool:
                return self._upstream_request.can_resume(
                    endpoint, last
                ) and self._upstream_request.resumes_exactly(endpoint)

            def at_all(endpoint: Endpoint) -> bool:
                return self._upstream_request.can_resume(endpoint, last)

            exact = self._picker.can_pick(self.route, self._demand, now, self.tried, exactly)
            only = exactly if exact else at_all
        return self._picker.pick(
            self.route,
            self._demand,
            now,
            tried=self.tried,
            fallback=self.route.fallback and self._allowed.fallback,
            only=only,
            # once an engine has refused the request, its refusal is the answer
            late=not self.num,
        )

    def may_leave(self, now: float, endpoint: Endpoint) -> bool:
        """Whether another engine could take a request that ``endpoint``'s engine has not begun to
        answer."""
        elsewhere: Tried = {*self.tried, endpoint.upstream.name}
        return self.may_retry(now, free=not self.num_lost, peek=True, tried=elsewhere)

    def may_retry(
        self, now: float, *, free: bool = False, peek: bool = False, tried: Tried | None = None
    ) -> bool:
        """Whether one more attempt is allowed. ``free``: it does not draw from the budget;
        ``peek``: it is not taken yet; ``tried``: endpoints to count as tried."""
        if (
            not self._allowed.retry
            or self.num >= self._config.max_attempts
            or not self._picker.can_pick(
                self.route,
                self._demand,
                now,
                self.tried if tried is None else tried,
                self._is_long_enough,
                fallback=self.route.fallback and self._allowed.fallback,
            )
        ):
            return False
        if free:
            return True
        return self._budget.left(now) >= 1.0 if peek else self._budget.take(now)

    def may_hedge(self, now: float, *, peek: bool = False) -> bool:
        """Whether a second engine may be asked while the first has not answered. Pays for it unless
        ``peek``."""
        return (
            self._allowed.hedge
            and self.num < self._config.max_attempts
            and not self._goes_on
            and (self._budget.left(now) >= 1.0 if peek else self._budget.take(now))
        )

    def may_resume(self, now: float, last: Endpoint, *, free: bool) -> bool:
        """Whether a stream that broke at ``last`` may resume elsewhere; if so, count and pay it."""
        relay = self._relay
        if (
            relay is None
            or not self._allowed.resume
            or self.num_resumes >= self._config.max_resumes
            or self.num >= self._config.max_attempts
            or (relay.resume_ids() is None and relay.partial_text() is None)
            or not self._picker.can_pick(
                self.route,
                self._demand,
                now,
                self.tried,
                lambda endpoint: self._upstream_request.can_resume(endpoint, last),
            )
            or not (free or self._budget.take(now, overdraw=True))
        ):
            return False
        self.num_resumes += 1
        return True

    def may_go_to_a_longer(self, now: float, endpoint: Endpoint) -> bool:
        """Whether an endpoint has a longer context than ``endpoint``'s, which was too short.
        Endpoints of unknown or shorter context do not count."""
        most = math.inf if endpoint.max_model_len is None else endpoint.max_model_len
        self._needs_more = max(self._needs_more or 0.0, most)
        if self.may_retry(now, peek=True):
            return True
        longer = self.route.longer
        if longer is None or not self._allowed.fallback:
            return False
        # the configuration names this route for long prompts, so its context need not be known
        self.route, self._needs_more = longer, None
        self.tried.clear()
        return self.may_retry(now, peek=True)

    def _is_long_enough(self, endpoint: Endpoint) -> bool:
        return self._needs_more is None or (endpoint.max_model_len or 0) > self._needs_more
