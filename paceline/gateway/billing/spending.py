"""Permissions and spending of keys: prices, budgets, their storage and reports, as configured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UnknownModelError
from paceline.gateway.billing.budgets import Budgets, Cost, LocalStore, Reservation
from paceline.gateway.billing.leases import LeaseStore
from paceline.gateway.billing.ledger import Ledger
from paceline.gateway.billing.reserving import Plan, endpoints_of
from paceline.gateway.routing.routes import Endpoint, Route
from paceline.gateway.settings.config import GatewayConfig, KeyConfig, budgets_of, prices_of
from paceline.gateway.settings.prices import Budget, Used, show_amount
from paceline.http.errors import HttpError

__all__ = ["Charge", "Spending"]


class Charge(msgspec.Struct, frozen=True):
    """Reservation of one request that was admitted."""

    reservation: Reservation
    # where it may go: to another model if the budget did not suffice
    route: Route
    # None: no budget applies
    plan: Plan | None = None
    # tokens of all its answers together; None: unlimited
    granted: int | None = None


class Spending:
    """Spending at one gateway. Call ``start`` on its event loop, and ``close`` at the end.

    Raises:
        ConfigError: the storage cannot be used.
    """

    def __init__(self, config: GatewayConfig, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self.prices = prices_of(config)
        # nothing has a price, so nothing is reserved
        self.is_free = not self.prices
        path = Path(config.spend_storage) if config.spend_storage and self.prices else None
        self.ledger = Ledger(path)
        budgets = budgets_of(config)
        shared = config.rate_limit_storage
        store = LeaseStore(shared) if shared and budgets else LocalStore(self.ledger)
        self._budgets = Budgets(
            budgets,
            frozenset(key.name for key in config.keys if key.soft),
            self.ledger,
            store,
            config.currency,
            wall,
        )
        self.currency = config.currency
        # amounts since the gateway began, by the model whose route requests took
        self.by_model: dict[str, int] = {}
        self._keys = {key.name: key for key in config.keys}

    def start(self) -> None:
        self.ledger.start()

    async def close(self) -> None:
        await self._budgets.close()
        await self.ledger.close()

    def key(self, name: str) -> KeyConfig | None:
        return self._keys.get(name, self._keys.get("*"))

    def may_use(self, name: str, model: str) -> bool:
        key = self.key(name)
        return key is None or not key.models or model in key.models

    def check(self, name: str, model: str, alias: str = "") -> None:
        """Raise HttpError 403 if a key may not request a model; ``alias``: the configured name with
        a ``*`` that matched it."""
        key = self.key(name) if self._keys else None
        if key is not None and not (self.may_use(name, model) or self.may_use(name, alias)):
            raise HttpError(
                403,
                f"this key may not use the model {model[:200]!r}; it may use "
                f"{', '.join(key.models[:20])}",
            )

    async def reserve(
        self,
        name: str,
        route: Route,
        plan: Callable[[Route], Plan],
        other: Callable[[str], Route] | None,
    ) -> Charge:
        """Reserve the cost of a request before it is sent.

        Args:
            plan: its use on a given route.
            other: the route of another model; None: the caller wants no other model.

        Raises:
            HttpError: 402 or 429, its key has spent its budget.
        """
        try:
            return await self._reserve(name, route, plan)
        except HttpError as refused:
            key = self.key(name)
            if other is None or key is None or key.over_budget in ("", route.model):
                raise
            try:
                route = other(key.over_budget)
            except (HttpError, UnknownModelError):
                # the other model cannot serve the request: report the budget as the reason
                raise refused from None
            if not route.tiers:
                raise
            return await self._reserve(name, route, plan)

    async def _reserve(self, name: str, route: Route, plan: Callable[[Route], Plan]) -> Charge:
        if self._budgets.budget(name) is None:
            return Charge(Reservation(name, 0, None), route)
        made = plan(route)
        endpoints = [(endpoint.upstream.name, endpoint.model) for endpoint in endpoints_of(route)]
        found = await self._budgets.reserve(name, made.amounts(self.prices, endpoints))
        granted = None
        if found.amount:
            granted = made.granted(
                lambda prompt: self.prices.affords(endpoints, prompt, found.amount)
            )
        return Charge(found, route, made, granted)

    def settle(self, charge: Charge, usage: Sequence[tuple[Endpoint, Used]]) -> None:
        """Settle a request that has ended; ``usage``: by endpoint, empty without an answer."""
        if self.is_free:
            return
        costs = []
        for number, (endpoint, used) in enumerate(usage):
            name, model = endpoint.upstream.name, endpoint.model
            price = self.prices.find(name, model)
            amount = 0 if price is None else price.of(used, whole=not number)
            costs.append(Cost(name, model, used, amount))
        self._budgets.settle(charge.reservation, costs)
        model, spent = charge.route.model, sum(cost.amount for cost in costs)
        self.by_model[model] = self.by_model.get(model, 0) + spent

    def cost(self, endpoint: Endpoint, used: Used) -> int:
        """Return what a request costs at an endpoint; 0 where it has no price."""
        price = self.prices.find(endpoint.upstream.name, endpoint.model)
        return 0 if price is None else price.of(used)

    def status(self) -> Mapping[str, Any]:
        """Return the status of configured keys, and of others that spent anything today."""
        today = self.ledger.spent_on(Budget(0, "day").begins(self._wall()))
        names = sorted({*self._keys, *today} - {"*"})
        return {name or "anybody": self._budgets.status(name) for name in names[:1000]}

    def spent_today(self) -> tuple[Mapping[str, float], float]:
        """Return today's spending by configured key, and of all others together, for metrics."""
        today = self.ledger.spent_on(Budget(0, "day").begins(self._wall()))
        named = {name: float(show_amount(today.get(name, 0))) for name in self._keys if name != "*"}
        others = sum(amount for name, amount in today.items() if name not in self._keys)
        return named, float(show_amount(others))
