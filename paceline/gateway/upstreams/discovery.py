"""Pools whose engines are the addresses of a DNS name, such as those of a headless Service of
Kubernetes, which lists the pods that are ready.

An address that appears is a new engine; one that is gone gets no new requests, and those it has go
on there. Names may be stale for as long as resolvers keep them: polls and breakers tell which
engine answers. A name without any address changes nothing, as that is also what a broken resolver
says.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from paceline.errors import ConfigError
from paceline.gateway.settings.engines import PoolConfig, PoolMembers, members_at
from paceline.gateway.upstreams.pools import PoolState
from paceline.http.errors import HttpError

__all__ = ["Discovery", "Resolve", "resolve"]

_log = logging.getLogger("paceline.gateway")

# addresses of a host
Resolve = Callable[[str], Awaitable[Collection[str]]]

# longest wait for a resolver, s
_TIMEOUT: Final = 5.0
# interval at which pools are looked at, s: one may get a name, or lose it, by a reload
_TURN: Final = 0.1


async def resolve(host: str) -> Collection[str]:
    """Return the IPv4 and IPv6 addresses of a host. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # an address with a zone is of one link only
    return {str(info[4][0]) for info in found if "%" not in str(info[4][0])}


class Discovery:
    """Follower of the names of a gateway's pools.

    Args:
        pools: by name; a reload changes them.
        tell: takes in what a pool has now.
        now: clock, monotonic seconds.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolState],
        tell: Callable[[str, PoolMembers], None],
        now: Callable[[], float],
        resolve: Resolve = resolve,
    ) -> None:
        self._pools = pools
        self._tell = tell
        self._now = now
        self._resolve = resolve
        # pool -> its settings at the last lookup, and when the next one is due under these
        self._due: dict[str, tuple[PoolConfig, float]] = {}
        # host -> lookup under way: one that hangs keeps a thread of few, and is not asked again
        self._lookups: dict[str, asyncio.Future[Collection[str]]] = {}
        # pool -> what went wrong last, to say it once
        self._troubles: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look up each name once, and go on doing so."""
        await self.turn()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for lookup in [*self._lookups.values()]:
            lookup.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TURN)
            try:
                await self.turn()
            except Exception:
                # a fault with one answer: the names are looked up again
                _log.exception("pool_lookup_failed")

    async def turn(self) -> None:
        """Look up the names that are due."""
        now = self._now()
        due = [
            pool.config
            for name, pool in self._pools.items()
            if pool.config.dns and self._is_due(name, pool.config, now)
        ]
        await asyncio.gather(*map(self._look, due))

    def _is_due(self, name: str, config: PoolConfig, now: float) -> bool:
        before, at = self._due.get(name, (config, now))
        return now >= at or before != config

    def _lookup(self, host: str) -> asyncio.Future[Collection[str]]:
        """Return the lookup of a host that is under way, or begin one."""
        found = self._lookups.get(host)
        if found is None:
            found = self._lookups[host] = asyncio.ensure_future(self._resolve(host))

            def over(lookup: asyncio.Future[Collection[str]]) -> None:
                self._lookups.pop(host, None)
                if not lookup.cancelled():
                    # nobody may wait for it any more
                    lookup.exception()

            found.add_done_callback(over)
        return found

    async def _look(self, config: PoolConfig) -> None:
        name, (host, port) = config.name, config.address
        self._due[name] = config, self._now() + config.every
        why, found = "it has no address", frozenset[str]()
        try:
            lookup = asyncio.shield(self._lookup(host))
            found = frozenset(await asyncio.wait_for(lookup, _TIMEOUT))
        except (OSError, TimeoutError, ValueError) as error:
            why = str(error) or f"no answer within {_TIMEOUT:g} s"
        pool = self._pools.get(name)
        if pool is None or pool.config != config:
            # a reload has changed it meanwhile
            self._due.pop(name, None)
            return
        if found:
            why = ""
            try:
                self._tell(name, members_at(found, port, pool.config, pool.known))
            except (ConfigError, HttpError) as error:
                why = str(error)
        if why and why != self._troubles.get(name):
            _log.warning("pool_unresolved pool=%s dns=%s reason=%r", name, config.dns, why)
        self._troubles[name] = why
