"""Storage of the counters: in this process, or in a Redis that several servers share.

The library ``limits`` implements the sliding windows; this module handles a Redis that does not
respond: **serving goes on, with counters of this process**, until Redis responds again. A limit
protects the server from its callers, so a lost limit store must not become an outage; and without
any limits a single caller could make it one. Every call is bounded in time, and while Redis is down
no request waits for it: one background task probes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from paceline.errors import ConfigError
from paceline.http.rate_limits.rates import Rate, Window

if TYPE_CHECKING:
    from limits import RateLimitItem

__all__ = ["RateStore", "check_storage_url"]

_T = TypeVar("_T")

_log = logging.getLogger("paceline.server")

_SCHEMES: Final = ("redis", "rediss", "redis+unix")
# seconds for one operation; a nearby Redis answers in a millisecond
_TIMEOUT: Final = 0.25
# seconds between two attempts to reach a Redis that is down
_PROBE_EVERY: Final = 1.0
_SWEEP_EVERY: Final = 1.0
# Lua counts with doubles
_NO_LIMIT: Final = 2**53


def check_storage_url(url: str) -> None:
    """Raise ConfigError unless a store can be made of ``url``. Never quotes all of it, as it may
    hold a password."""
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"the rate limit storage is a URL that begins with one of {', '.join(_SCHEMES)}, got "
            f"scheme {scheme[:20]!r}"
        )


@dataclass(frozen=True, slots=True)
class _Backend:
    """The library's storage and its strategy on top."""

    storage: Any
    strategy: Any


class RateStore:
    """Counters of sliding windows by kind ("requests", "tokens") and caller.

    Used on one event loop. ``close`` when done.

    Args:
        url: of a Redis; None keeps the counters in this process.
        timeout: seconds after which an operation counts as failed.
        probe_every: seconds between attempts to reach a Redis that is down.
        sweep_every: seconds between two removals of expired counters in this process.

    Raises:
        ConfigError: the URL is not understood, or its client is not installed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout: float = _TIMEOUT,
        probe_every: float = _PROBE_EVERY,
        sweep_every: float = _SWEEP_EVERY,
    ) -> None:
        # imported here, as it takes 0.2 s and most servers have no limits
        from limits.aio.storage import MemoryStorage

        self._timeout = timeout
        self._probe_every = probe_every
        self._sweep_every = sweep_every
        # the task that the library's storage waits for, and its sweep that began before
        self._pause: asyncio.Task[None] | None = None
        self._sweep: asyncio.Task[None] | None = None
        self._memory = _backend(MemoryStorage())
        self._shared = None if url is None else _redis(url, timeout)
        self._probe: asyncio.Task[None] | None = None
        # incremented whenever counting moves to the other storage
        self._epoch = 0
        # operations that failed on the shared storage
        self.failures = 0

    @property
    def shared(self) -> bool:
        """Whether a storage outside of this process is configured."""
        return self._shared is not None

    @property
    def up(self) -> bool:
        """Whether the configured storage is in use."""
        return self._probe is None

    async def take(self, kind: str, who: str, rate: Rate, cost: int) -> tuple[bool, Window]:
        """Count ``cost`` if it fits; return whether it did, and the window after that."""
        item = _item(rate)

        async def on(backend: _Backend, epoch: int) -> tuple[bool, Window]:
            taken = bool(await backend.strategy.hit(item, kind, who, cost=cost))
            return taken, await _window(backend, item, kind, who, rate, epoch)

        return await self._do(on)

    async def look(self, kind: str, who: str, rate: Rate) -> Window:
        """Return the present window."""
        item = _item(rate)

        async def on(backend: _Backend, epoch: int) -> Window:
            return await _window(backend, item, kind, who, rate, epoch)

        return await self._do(on)

    async def give_back(self, kind: str, who: str, window: Window, amount: int) -> None:
        """Subtract ``amount`` from the current window, in which it must have been counted; below 0:
        more was used than was taken, and that counts regardless of the limit.

        Args:
            window: the result of ``take``. If counting has moved to the other storage since,
                nothing is given back: its counters would fall below what was taken from them.
        """
        if amount > 0 and window.epoch != self._epoch:
            return
        backend = self._memory
        if self._shared is not None and self._probe is None:
            backend = self._shared
        item = _item(window.rate)
        key = item.key_for(kind, who)
        try:
            async with asyncio.timeout(self._timeout):
                await backend.storage.acquire_sliding_window_entry(
                    key, _NO_LIMIT, item.get_expiry(), -amount
                )
        except Exception as error:
            if backend is self._memory:
                raise
            self._lost(error)
        if backend is self._memory:
            self._rest()

    async def _do(self, operation: Callable[[_Backend, int], Awaitable[_T]]) -> _T:
        if self._shared is not None and self._probe is None:
            try:
                async with asyncio.timeout(self._timeout):
                    return await operation(self._shared, self._epoch)
            except Exception as error:
                self._lost(error)
        done = await operation(self._memory, self._epoch)
        self._rest()
        return done

    def _rest(self) -> None:
        """Keep the library from removing expired counters with every charge: with 10,000 callers
        that takes a millisecond. It starts no sweep while the task in ``timer`` runs."""
        storage = self._memory.storage
        if storage.timer is not self._pause:
            self._sweep = storage.timer
            storage.timer = self._pause = asyncio.ensure_future(asyncio.sleep(self._sweep_every))

    def _lost(self, error: Exception) -> None:
        self.failures += 1
        if self._probe is not None:
            return
        # the error's text may quote the URL
        _log.warning(
            "rate_limit_storage up=false error=%s: limits are held by this process alone until it "
            "answers again",
            type(error.__cause__ or error).__name__,
        )
        self._epoch += 1
        self._probe = asyncio.ensure_future(self._until_back())

    async def _until_back(self) -> None:
        shared = self._shared
        assert shared is not None, "only a shared storage is lost"
        while True:
            await asyncio.sleep(self._probe_every)
            try:
                async with asyncio.timeout(self._timeout):
                    # by counting: a Redis that answers pings may still refuse the scripts that
                    # count
                    back = await shared.strategy.hit(_item(Rate(1_000_000, 1)), "probe")
            except Exception:
                back = False
            if back:
                break
        _log.warning("rate_limit_storage up=true")
        await self._memory.storage.reset()
        self._epoch += 1
        self._probe = None

    async def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        if self._shared is not None:
            await self._shared.storage.bridge.storage.aclose()


def _item(rate: Rate) -> RateLimitItem:
    from limits import RateLimitItemPerSecond

    return RateLimitItemPerSecond(rate.amount, rate.seconds, namespace="paceline")


async def _window(
    backend: _Backend, item: RateLimitItem, kind: str, who: str, rate: Rate, epoch: int
) -> Window:
    key = item.key_for(kind, who)
    previous, previous_left, current, current_left = await backend.storage.get_sliding_window(
        key, rate.seconds
    )
    # the library keeps a window's counter for twice the window's length
    rolls_in = max(0.0, current_left - rate.seconds) if current else float(rate.seconds)
    return Window(rate, previous, previous_left, current, rolls_in, epoch)


def _backend(storage: Any) -> _Backend:
    from limits.aio.strategies import SlidingWindowCounterRateLimiter

    return _Backend(storage, SlidingWindowCounterRateLimiter(storage))


def _redis(url: str, timeout: float) -> _Backend:
    check_storage_url(url)
    from limits.aio.storage import RedisStorage
    from limits.errors import ConfigurationError

    try:
        storage = RedisStorage(
            f"async+{url}",
            implementation="redispy",
            key_prefix="paceline",
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
        )
    except ConfigurationError as error:
        raise ConfigError(
            "the rate limit storage needs the Redis client: pip install 'paceline[redis]'"
        ) from error
    except ValueError:
        raise ConfigError("the rate limit storage must be the URL of a Redis") from None
    return _backend(storage)
