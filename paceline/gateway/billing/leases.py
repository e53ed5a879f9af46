"""Budgets shared by several gateways: leases on a counter in Redis.

A gateway reserves a hundredth of a budget in advance, and counts what it serves against that lease
in memory; it asks Redis when a lease is used up, and in the background before that. It gives back
what is left at the end, and what requests leave unused beyond two leases. So at most two leases per
gateway lie idle, and nothing is spent twice. What was spent beyond a lease (by a request that cost
more than estimated, or whose budget only warns) is added at once. No scripts are needed: ``INCRBY``
adds, and subtracts again if the sum exceeds the budget.

While Redis does not answer, each gateway counts alone from the last value it saw, and asks again
once a second: a lost counter must neither stop requests nor lift the budget. If the counter is
flushed, counting starts at zero, and so does the budget.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["LeaseStore"]

_log = logging.getLogger("paceline.gateway")

# timeout of one operation, s
_TIMEOUT: Final = 0.25
_RETRY_SECONDS: Final = 1.0
_TRIES: Final = 4
# value beyond which a counter is not raised further; Redis counts with 63 bits
_MOST: Final = 2**62
# share of a budget that one gateway leases in advance
_LEASE_SHARE: Final = 0.01
# seconds that a window's counter is kept after its last use
_KEEP_SECONDS: Final = 40 * 86400


@dataclass(slots=True)
class _Lease:
    """Lease of one gateway on one window of a key's budget."""

    # leased and not used
    left: int = 0
    # amount leased in advance
    step: int = 0
    # last seen value of the counter in Redis
    total: int = 0
    # still to be added to the counter: used while Redis was away; negative: leased in vain
    owed: int = 0
    refilling: bool = False
    # task that gives back a part; the counter holds it as used until the task ends
    returning: asyncio.Task[None] | None = None
    # amount that the budget refused, and when so much may be asked for again
    refused: int = 0
    refused_until: float = 0.0


class LeaseStore:
    """``BudgetStore`` whose counters lie in Redis.

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
            raise ConfigError("the storage of budgets must be the URL of a Redis") from None
        self._leases: dict[tuple[str, str], _Lease] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # event loop time until which Redis is not asked
        self._away_until = 0.0
        self.failures = 0

    def used(self, key: str, begins: str) -> int:
        lease = self._lease(key, begins)
        return lease.total - lease.left + lease.owed

    async def take(self, key: str, begins: str, amount: int, most: int) -> tuple[bool, int]:
        lease = self._lease(key, begins)
        lease.step = step = max(1, int(most * _LEASE_SHARE))
        if amount > most:
            # it can never fit, and may exceed what Redis counts with
            return False, self.used(key, begins)
        for _ in range(_TRIES):
            if lease.left >= amount or not self._may_ask(lease, amount - lease.left):
                break
            if lease.returning is not None:
                await asyncio.wait((lease.returning,))
                continue
            # other requests may use up the lease during the call
            await self._lend(key, begins, lease, amount - lease.left, step, most)
        if lease.left >= amount:
            lease.left -= amount
            if lease.left < step // 2 and not lease.refilling and self._may_ask(lease, step):
                lease.refilling = True
                self._spawn(self._refill(key, begins, lease, step, most))
            return True, lease.total - lease.left - amount
        if self._is_away():
            # count alone, from the last value seen
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
        """Give a part back to the counter, for other gateways; negative: take a part."""
        total = await self._add_with_owed(key, begins, lease, -amount)
        lease.returning = None
        if total is None:
            lease.left += amount
        else:
            lease.total = total

    async def close(self) -> None:
        """Give back all that was not used."""
        # tasks that are still running could lease more
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for (key, begins), lease in self._leases.items():
            if lease.left or lease.owed:
                await self._add(key, begins, lease.owed - lease.left)
        await self._redis.aclose()

    def _lease(self, key: str, begins: str) -> _Lease:
        found = self._leases.get((key, begins))
        if found is None:
            for old in [old for old in self._leases if old[0] == key]:
                # its window is over, so the rest is worthless
                del self._leases[old]
            found = self._leases[key, begins] = _Lease()
        return found

    async def _lend(
        self, key: str, begins: str, lease: _Lease, needed: int, step: int, most: int
    ) -> None:
        """Lease what is needed and one step more, or only what is needed if no more is left."""
        for wanted in (needed + step, needed):
            total = await self._add_with_owed(key, begins, lease, wanted)
            if total is None:
                return
            if total <= most:
                lease.total, lease.left = total, lease.left + wanted
                return
            back = await self._add(key, begins, -wanted)
            if back is None:
                # the counter still holds it; the next addition corrects that
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
        # cleared before the call, so that a concurrent request does not add it twice
        owed, lease.owed = lease.owed, 0
        total = await self._add(key, begins, amount + owed)
        if total is None:
            lease.owed += owed
        return total

    async def _add(self, key: str, begins: str, amount: int) -> int | None:
        """Add to the counter and return its value; None: Redis does not answer."""
        if self._is_away():
            return None
        name = f"paceline:budget:{{{key}}}:{begins}"
        try:
            async with asyncio.timeout(_TIMEOUT):
                total = int(await self._redis.incrby(name, amount))
                if begins:
                    # the window of a "total" budget never ends
                    await self._redis.expire(name, _KEEP_SECONDS)
        except Exception as error:
            # the error's text may quote the URL
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
