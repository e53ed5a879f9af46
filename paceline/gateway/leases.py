"""Budgets that several gateways share: leases on a counter in Redis.

A gateway takes a hundredth of a budget ahead, and what it serves is counted against that lease in
memory; Redis is asked when a lease is used up, and in the background before that. What is left at
the end goes back, and so does what requests leave of what they reserved, beyond two leases. So at
most two leases a gateway lie idle, and none is spent twice. What was spent beyond a lease (by a
request that cost more than it was said to, or whose budget only warns) is told at once. It takes no
scripts: ``INCRBY`` alone, and back where the sum went beyond the budget.

While Redis does not answer, each gateway counts alone from what it last saw, and asks again once a
second: a counter that is away must be neither an outage nor an open door. A counter that was
flushed begins at nothing, and so does the budget.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["LeaseStore"]

_log = logging.getLogger("paceline.gateway")

# seconds for one operation
_TIMEOUT: Final = 0.25
_RETRY_SECONDS: Final = 1.0
_TRIES: Final = 4
# of a counter, beyond which nothing is told apart; Redis counts with 63 bits
_MOST: Final = 2**62
# of a budget, that one gateway takes ahead
_LEASE_SHARE: Final = 0.01
# seconds that a window's counter is kept after its last use
_KEEP_SECONDS: Final = 40 * 86400


@dataclass(slots=True)
class _Lease:
    """Of one key and window."""

    # taken and not used
    left: int = 0
    # what is taken ahead
    step: int = 0
    # the counter in Redis when it was last seen
    total: int = 0
    # to be added to the counter: used beyond the lease while Redis was away; below 0: taken in vain
    owed: int = 0
    refilling: bool = False
    # what is on its way back to the counter, where it is counted as used until it is there
    returning: asyncio.Task[None] | None = None
    # so much was refused a moment ago, and until then is not asked for again
    refused: int = 0
    refused_until: float = 0.0


class LeaseStore:
    """See ``BudgetStore``.

    Raises:
        ConfigError: the client is not installed, or the URL is not one of a Redis.
    """

    def __init__(self, url: str) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError as error:
            raise ConfigError(
                "budgets over Redis need its client: pip install 'paceline[redis]'"
            ) from error
        try:
            self._redis: Redis = Redis.from_url(
                url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT
            )
        except ValueError:
            raise ConfigError("the storage of budgets is not the URL of a Redis") from None
        self._leases: dict[tuple[str, str], _Lease] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # of the event loop's clock; until then Redis is not asked
        self._away_until = 0.0
        self.failures = 0

    def used(self, key: str, begins: str) -> int:
        lease = self._lease(key, begins)
        return lease.total - lease.left + lease.owed

    async def take(self, key: str, begins: str, amount: int, most: int) -> tuple[bool, int]:
        lease = self._lease(key, begins)
        lease.step = step = max(1, int(most * _LEASE_SHARE))
        if amount > most:
            # it never fits, and may be more than Redis counts with
            return False, self.used(key, begins)
        for _ in range(_TRIES):
            if lease.left >= amount or not self._may_ask(lease, amount - lease.left):
                break
            if lease.returning is not None:
                await asyncio.wait((lease.returning,))
                continue
            # others may use it while Redis is asked
            await self._lend(key, begins, lease, amount - lease.left, step, most)
        if lease.left >= amount:
            lease.left -= amount
            if lease.left < step // 2 and not lease.refilling and self._may_ask(lease, step):
                lease.refilling = True
                self._spawn(self._refill(key, begins, lease, step, most))
            return True, lease.total - lease.left - amount
        if self._is_away():
            # alone, from what was last seen
            used = self.used(key, begins)
            if used + amount <= most:
                lease.owed += amount
                return True, used
            return False, used
        return False, self.used(key, begins)

    def give_back(self, key: str, begins: str, amount: int) -> None:
        if amount >= 0 and (key, begins) not in self._leases:
            return
        lease = self._lease(key, begins)
        lease.left += amount
        if lease.returning is not None or self._is_away():
            return
        if lease.left > 2 * lease.step:
            self._give(key, begins, lease, lease.left - lease.step)
        elif lease.left < 0 and lease.total < _MOST:
            self._give(key, begins, lease, lease.left)

    def _give(self, key: str, begins: str, lease: _Lease, amount: int) -> None:
        lease.left -= amount
        lease.returning = self._spawn(self._return(key, begins, lease, amount))

    async def _return(self, key: str, begins: str, lease: _Lease, amount: int) -> None:
        """To the counter, for other gateways; below 0: from it."""
        total = await self._add_with_owed(key, begins, lease, -amount)
        lease.returning = None
        if total is None:
            lease.left += amount
        else:
            lease.total = total

    async def close(self) -> None:
        """Give back what was not used."""
        # what is under way would take more
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for (key, begins), lease in self._leases.items():
            if lease.left or lease.owed:
                await self._add(key, begins, lease.owed - lease.left)
        await self._redis.aclose()

    def _lease(self, key: str, begins: str) -> _Lease:
        found = self._leases.get((key, begins))
        if found is None:
            for old in [old for old in self._leases if old[0] == key]:
                # its window is over, and what is left of it worth nothing
                del self._leases[old]
            found = self._leases[key, begins] = _Lease()
        return found

    async def _lend(
        self, key: str, begins: str, lease: _Lease, needed: int, step: int, most: int
    ) -> None:
        """As much as is needed and a step more, or what is needed alone where that is all."""
        for wanted in (needed + step, needed):
            total = await self._add_with_owed(key, begins, lease, wanted)
            if total is None:
                return
            if total <= most:
                lease.total, lease.left = total, lease.left + wanted
                return
            back = await self._add(key, begins, -wanted)
            if back is None:
                # the counter has it still, until something else is added
                lease.total = total
                lease.owed -= wanted
            else:
                lease.total = back
            lease.refused = wanted
            lease.refused_until = asyncio.get_running_loop().time() + _RETRY_SECONDS
            if lease.total + lease.owed + needed > most:
                lease.refused = needed
                return

    async def _refill(self, key: str, begins: str, lease: _Lease, step: int, most: int) -> None:
        try:
            await self._lend(key, begins, lease, step, 0, most)
        finally:
            lease.refilling = False

    async def _add_with_owed(self, key: str, begins: str, lease: _Lease, amount: int) -> int | None:
        # taken before others may ask meanwhile, so that it is added once
        owed, lease.owed = lease.owed, 0
        total = await self._add(key, begins, amount + owed)
        if total is None:
            lease.owed += owed
        return total

    async def _add(self, key: str, begins: str, amount: int) -> int | None:
        """The counter after that; None: Redis does not answer."""
        if self._is_away():
            return None
        name = f"paceline:budget:{{{key}}}:{begins}"
        try:
            async with asyncio.timeout(_TIMEOUT):
                total = int(await self._redis.incrby(name, amount))
                if begins:
                    # a budget for good has no window that ends
                    await self._redis.expire(name, _KEEP_SECONDS)
        except Exception as error:
            # its text may quote the URL
            self.failures += 1
            _log.warning(
                "budget_storage up=false error=%s: budgets are held by this process alone",
                type(error).__name__,
            )
            self._away_until = asyncio.get_running_loop().time() + _RETRY_SECONDS
            return None
        return total

    def _may_ask(self, lease: _Lease, amount: int) -> bool:
        now = asyncio.get_running_loop().time()
        return now >= self._away_until and (amount < lease.refused or now >= lease.refused_until)

    def _is_away(self) -> bool:
        return asyncio.get_running_loop().time() < self._away_until

    def _spawn(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
