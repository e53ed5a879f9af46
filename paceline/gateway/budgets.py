"""What a key may still spend: the dearest that a request could be is reserved before it is sent,
and the rest given back once it is known what it was.

::

    request ---- reserve(want) ----> sent ----> settle(what it cost)
                 refused: 429 until the window is over, 402 where it never is

So requests that arrive together cannot all spend the same last cent, and whatever is done for one
request (retries, other engines) is settled once. Where several gateways share a budget, each holds
leases on it (``leases``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from paceline.gateway.ledger import Ledger
from paceline.gateway.money import Budget, Used, show_amount
from paceline.http.errors import HttpError
from paceline.http.rate_limits.rates import Want, go_duration

__all__ = ["BudgetStore", "Budgets", "Cost", "LocalStore", "Reservation"]

_log = logging.getLogger("paceline.gateway")

# of a budget, at which the log says so
_WARN_AT: Final = 0.8
# to reserve what is left, of which others take some meanwhile
_TRIES: Final = 4
# seconds after which a request of the same key may have ended
_SOON: Final = 1.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Of one request."""

    key: str
    amount: int
    # the window that it counts in; None: the key has no budget
    begins: str | None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of what one engine made of an answer."""

    engine: str
    model: str
    used: Used
    amount: int


class BudgetStore(Protocol):
    """Where it is counted what is reserved and spent of a window."""

    def used(self, key: str, begins: str) -> int:
        """What was spent or is reserved, as far as that was seen."""
        ...

    async def take(self, key: str, begins: str, amount: int, most: int) -> tuple[bool, int]:
        """Whether ``amount`` fits below ``most``; and what was spent or is reserved by others."""
        ...

    def give_back(self, key: str, begins: str, amount: int) -> None:
        """Of what was taken; negative: it cost more."""
        ...

    async def close(self) -> None: ...


class LocalStore:
    """Of this process alone, beginning with what the ledger has."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._taken: dict[tuple[str, str], int] = {}

    def used(self, key: str, begins: str) -> int:
        window = (key, begins)
        if window not in self._taken:
            # a window that has begun anew: nobody asks for the one before
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
    """Of one gateway.

    Args:
        by_key: budgets, "*" of keys that have none of their own.
        soft: keys that are only warned of.
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
        # windows of which the log has told
        self._warned: set[tuple[str, str]] = set()
        # what this process has reserved, by key and window
        self._held: dict[tuple[str, str], int] = {}

    def budget(self, key: str) -> Budget | None:
        return self._by_key.get(key, self._by_key.get("*"))

    async def reserve(self, key: str, want: Want) -> Reservation:
        """Raises HttpError 429 or 402, with the numbers, where it does not fit."""
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
            # nothing is held back for it, and what it costs is counted all the same
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
            # what requests under way leave of what they reserved will do
            told += ". Requests that are under way have reserved the rest"
            return HttpError(429, told, retry_after=_SOON)
        if wait is None:
            return HttpError(402, told)
        return HttpError(429, f"{told}. It begins anew in {go_duration(wait)}", retry_after=wait)

    def settle(self, reservation: Reservation, costs: Sequence[Cost]) -> None:
        """A request has ended; ``costs``: at each engine that made a part of its answer."""
        cost = sum(each.amount for each in costs)
        self._give_back(reservation, cost)
        day = Budget(0, "day").begins(self._wall())
        for number, each in enumerate(costs):
            self._ledger.add(
                reservation.key, day, each.engine, each.model, each.used, each.amount,
                requests=int(not number),
            )  # fmt: skip

    def _give_back(self, reservation: Reservation, cost: int) -> None:
        """What was reserved beyond the cost; below 0 what it cost beyond that."""
        key, begins, budget = reservation.key, reservation.begins, self.budget(reservation.key)
        if begins is None or budget is None:
            return
        self._hold(key, begins, -reservation.amount)
        now = budget.begins(self._wall())
        if now == begins:
            self._store.give_back(key, begins, reservation.amount - cost)
        elif cost:
            # it counts where it ended, as in the ledger
            self._store.give_back(key, now, -cost)

    def status(self, key: str) -> Mapping[str, str | None]:
        """What a key has spent of its budget, and today where it has none."""
        budget = self.budget(key) or Budget(0, "day")
        spent = self._ledger.spent(key, budget.begins(self._wall()))
        return {
            "spent": show_amount(spent),
            "budget": None if self.budget(key) is None else str(budget),
            "currency": self._currency,
        }

    async def close(self) -> None:
        await self._store.close()
