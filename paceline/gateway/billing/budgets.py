"""Budgets of keys: the largest cost that a request could have is reserved before it is sent, and
the rest is given back once its cost is known.

::

    request ---- reserve(want) ----> sent ----> settle(what it cost)
                 refused: 429 until the window ends, 402 if it never does

So requests that arrive together cannot all spend the same last cent, and everything done for one
request (retries, other engines) is settled once. Gateways that share a budget hold leases on it
(``leases``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from paceline.gateway.billing.ledger import Ledger
from paceline.gateway.settings.prices import Budget, Used, show_amount
from paceline.http.errors import HttpError
from paceline.http.rate_limits.rates import Want, go_duration

__all__ = ["NOTHING", "BudgetStore", "Budgets", "Cost", "LocalStore", "Reservation"]

_log = logging.getLogger("paceline.gateway")

# share of a budget from which the log warns
_WARN_AT: Final = 0.8
# tries to reserve what is left while other requests take some of it
_TRIES: Final = 4
# seconds after which another request of the key may have ended
_SOON: Final = 1.0


class Reservation(msgspec.Struct, frozen=True):
    """Amount reserved for one request."""

    key: str
    amount: int
    # first day of the window that it counts in; None: the key has no budget
    begins: str | None


# of a request that no budget applies to
NOTHING: Final = Reservation("", 0, None)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one engine's part of an answer."""

    engine: str
    model: str
    used: Used
    amount: int


class BudgetStore(Protocol):
    """Counter of what is reserved and spent in each window."""

    def used(self, key: str, begins: str) -> int:
        """Return what was spent or is reserved, as last seen."""
        ...

    async def take(self, key: str, begins: str, amount: int, most: int) -> tuple[bool, int]:
        """Reserve ``amount`` if it fits below ``most``; return whether it did, and others' use."""
        ...

    def give_back(self, key: str, begins: str, amount: int) -> None:
        """Give back a part of what was taken; negative: the request cost more."""
        ...

    async def close(self) -> None: ...


class LocalStore:
    """Counter of this process alone, starting from the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._taken: dict[tuple[str, str], int] = {}

    def used(self, key: str, begins: str) -> int:
        window = (key, begins)
        if window not in self._taken:
            # a new window has begun: the one before is not needed any more
            for old in [old for old in self._taken if old[0] == key]:
                del self._taken[old]
            self._taken[window] = self._ledger.spent(key, begins)
        return self._taken[window]

    async def take(self, key: str, begins: str, amount: int, most: int) -> tuple[bool, int]:
        before = self.used(key, begins)
        fits = before + amount <= most
        if fits:
            self._taken[key, begins] += amount
        return fits, before

    def give_back(self, key: str, begins: str, amount: int) -> None:
        if (key, begins) in self._taken:
            self._taken[key, begins] -= amount

    async def close(self) -> None:
        return None


class Budgets:
    """Budgets of one gateway.

    Args:
        by_key: budget of each key; "*": of keys without an entry.
        soft: keys that are warned about instead of refused.
        wall: seconds of the wall clock.
    """

    def __init__(
        self,
        by_key: Mapping[str, Budget],
        soft: frozenset[str],
        ledger: Ledger,
        store: BudgetStore,
        currency: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._by_key, self._soft, self._currency = dict(by_key), soft, currency
        self._ledger, self._store, self._wall = ledger, store, wall
        # windows that the log has warned of
        self._warned: set[tuple[str, str]] = set()
        # reserved by this process, by key and window
        self._held: dict[tuple[str, str], int] = {}

    def budget(self, key: str) -> Budget | None:
        return self._by_key.get(key, self._by_key.get("*"))

    async def reserve(self, key: str, want: Want) -> Reservation:
        """Reserve what a request may cost. Raises HttpError 429 or 402, with the numbers."""
        budget = self.budget(key)
        if budget is None:
            return Reservation(key, 0, None)
        now = self._wall()
        begins = budget.begins(now)
        want = want.within(budget.amount)
        before = self._store.used(key, begins)
        for _ in range(_TRIES):
            amount = want.of(budget.amount - before)
            fits, before = await self._store.take(key, begins, amount, budget.amount)
            if fits or want.of(budget.amount - before) >= amount:
                break
        share = before / budget.amount if budget.amount else 1.0
        if (not fits or share >= _WARN_AT) and (key, begins) not in self._warned:
            self._warned = {told for told in self._warned if told[0] != key} | {(key, begins)}
            _log.warning("budget_nearly_spent key=%s budget=%s share=%.2f", key, budget, share)
        if fits:
            self._hold(key, begins, amount)
            return Reservation(key, amount, begins)
        if (key if key in self._by_key else "*") in self._soft:
            # a soft budget reserves nothing, but its cost counts all the same
            return Reservation(key, 0, begins)
        raise self._refusal(key, budget, before, want.least, now)

    def _hold(self, key: str, begins: str, amount: int) -> None:
        held = self._held.get((key, begins), 0) + amount
        if held:
            self._held[key, begins] = held
        else:
            self._held.pop((key, begins), None)

    def _refusal(self, key: str, budget: Budget, before: int, worst: int, now: float) -> HttpError:
        wait = budget.ends_in(now)
        told = (
            f"the budget of this key is {budget} {self._currency}: "
            f"{show_amount(min(before, budget.amount))} are spent or reserved, and this request "
            f"may cost {show_amount(worst)}"
        )
        if before - self._held.get((key, budget.begins(now)), 0) + worst <= budget.amount:
            # it will fit once running requests give back what they do not use
            told += ". Running requests have reserved the rest"
            return HttpError(429, told, retry_after=_SOON)
        if wait is None:
            return HttpError(402, told)
        return HttpError(429, f"{told}. It resets in {go_duration(wait)}", retry_after=wait)

    def settle(self, reservation: Reservation, costs: Sequence[Cost]) -> None:
        """Settle a request that has ended; ``costs``: one per engine that made a part of it."""
        cost = sum(each.amount for each in costs)
        self._give_back(reservation, cost)
        day = Budget(0, "day").begins(self._wall())
        for number, each in enumerate(costs):
            self._ledger.add(
                reservation.key, day, each.engine, each.model, each.used, each.amount,
                requests=int(not number),
            )  # fmt: skip

    def _give_back(self, reservation: Reservation, cost: int) -> None:
        """Give back what was reserved beyond the cost, or take what it cost beyond that."""
        key, begins, budget = reservation.key, reservation.begins, self.budget(reservation.key)
        if begins is None or budget is None:
            return
        self._hold(key, begins, -reservation.amount)
        now = budget.begins(self._wall())
        if now == begins:
            self._store.give_back(key, begins, reservation.amount - cost)
        elif cost:
            # the cost counts in the window in which the request ended, as in the ledger
            self._store.give_back(key, now, -cost)

    def status(self, key: str) -> Mapping[str, str | None]:
        """Return what a key has spent of its budget, or today if it has none."""
        budget = self.budget(key) or Budget(0, "day")
        spent = self._ledger.spent(key, budget.begins(self._wall()))
        return {
            "spent": show_amount(spent),
            "budget": None if self.budget(key) is None else str(budget),
            "currency": self._currency,
        }

    async def close(self) -> None:
        await self._store.close()
