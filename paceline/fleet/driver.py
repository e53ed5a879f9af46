"""Driver of a fleet: looks at hosts and gateways several times a second, asks each pool's
controller, and does what it says.

The driver may end at any time, and the next one goes on: what runs is found by the host, and what
the gateways know is said again. Replicas never wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from paceline.files import write_private
from paceline.fleet.controller import Command, Controller, Seen, Spec
from paceline.fleet.gateways import Gateways
from paceline.fleet.host import Host, Look
from paceline.fleet.replica import last_number
from paceline.fleet.spec import PoolSettings
from paceline.http.fields import FLEET_HEADER
from paceline.http.small import fetch
from paceline.http.upstream import Origin, Pool

__all__ = ["STATUS", "Driver"]

_log = logging.getLogger("paceline.fleet")

# name of the file that says how the fleet is, in the folder of what runs
STATUS: Final = "status"
_PERIOD: Final = 0.25
# times that a replica is looked at before it would end as unwatched, and the longest look, s
_WATCHES: Final = 4
_LOOK_TIMEOUT: Final = 2.0
# longest wait at the end until every gateway knows that a pool is empty, s
_LAST_WORD: Final = 3.0


class Driver:
    """Driver of all pools of a fleet.

    Args:
        folder: of what runs; names of replicas that were ever used are known by its files.
        now: clock, monotonic seconds.
    """

    def __init__(
        self,
        host: Host,
        gateways: Gateways,
        folder: Path,
        now: Callable[[], float],
        exit_unwatched: float,
    ) -> None:
        self.controllers: dict[str, Controller] = {}
        self._host = host
        self._gateways = gateways
        self._folder = folder
        self._now = now
        self._settings: dict[str, PoolSettings] = {}
        self._looked: Mapping[str, Look] = {}
        # replica -> the last command, as an end is asked for until the process is gone
        self._logged: dict[str, str] = {}
        # the status as written last, and whether that went well
        self._shown: Mapping[str, Any] = {}
        self._writes = True
        self._watching = asyncio.ensure_future(self._watch(exit_unwatched / _WATCHES))

    async def start(self, pools: tuple[PoolSettings, ...]) -> None:
        """Take over what runs already, also of pools that are not wanted any more."""
        self._looked = await self._host.look()
        self.change(pools)
        for name, look in self._looked.items():
            if look.alive is False:
                # it ended before this controller began, which is no failed start
                continue
            pool = name.rpartition("-")[0]
            if pool not in self.controllers:
                self._add(pool, Spec(0))
            self.controllers[pool].adopt(name, look.version, look.url, self._now())
            _log.info("replica_adopted name=%s version=%s", name, look.version)

    async def close(self) -> None:
        """Let go of everything; replicas run on."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._gateways.close()
        await self._host.close()

    async def _watch(self, period: float) -> None:
        """Have the replicas know that they are watched, also where no gateway reaches them."""
        while True:
            await asyncio.sleep(period)
            urls = [each.url for each in self._looked.values() if each.alive and each.url]
            await asyncio.gather(*map(_look_at, urls), return_exceptions=True)

    def change(self, pools: tuple[PoolSettings, ...]) -> None:
        """Set what the pools shall be from now on; one that is not named ends."""
        self._settings.update((pool.name, pool) for pool in pools)
        for pool in pools:
            if pool.name in self.controllers:
                self.controllers[pool.name].change(pool.spec())
            else:
                self._add(pool.name, pool.spec())
        for name in self.controllers.keys() - {pool.name for pool in pools}:
            none = replace(self.controllers[name].spec, replicas=0, scale=None)
            self.controllers[name].change(none)

    def _add(self, pool: str, spec: Spec) -> None:
        self.controllers[pool] = Controller(pool, spec, number=1 + last_number(self._folder, pool))

    @property
    def is_settled(self) -> bool:
        """Whether every pool is as it shall be."""
        return all(each.is_settled for each in self.controllers.values())

    async def step(self) -> None:
        """Look, decide and act once.

        Raises SupersededError if a later controller has taken over: it owns the replicas now.
        """
        self._gateways.check()
        looked = self._looked = await self._host.look()
        now = self._now()
        for pool, controller in self.controllers.items():
            seen = {
                name: self._gateways.seen(pool, name, self._seen(looked.get(name)))
                for name in controller.replicas
            }
            before = dict(controller.replicas)
            commands = controller.step(now, seen)
            # before anything ends, no gateway is to send it new requests
            self._gateways.tell(pool, controller.members(now))
            for command in commands:
                await self._carry_out(command, pool)
            self._log_changes(before, controller)
        known = {name for each in self.controllers.values() for name in each.replicas}
        for name in looked.keys() - known:
            # it has ended, or was given up and is back
            await self._host.end(name, kill=True)
        self._write_status()

    async def run(self, stop: asyncio.Event, *, until_settled: bool = False) -> None:
        """Step until ``stop``, or until every pool is as it shall be."""
        while not stop.is_set() and not (until_settled and self.is_settled and self._shown):
            await self.step()
            try:
                await asyncio.wait_for(stop.wait(), _PERIOD)
            except TimeoutError:
                continue

    async def say_last_word(self) -> None:
        """Have the gateways know what was said last, as far as they answer."""
        for pool in self.controllers:
            await self._gateways.told(pool, _LAST_WORD)

    async def _carry_out(self, command: Command, pool: str) -> None:
        if self._logged.get(command.name) != command.kind:
            self._logged[command.name] = command.kind
            _log.info("%s name=%s version=%s", command.kind, command.name, command.version or "-")
        if command.kind == "start":
            await self._host.start(command, self._settings[pool])
        else:
            await self._host.end(command.name, kill=command.kind == "kill")

    def _seen(self, look: Look | None) -> Seen:
        if look is None:
            return Seen()
        return Seen(look.url, look.alive, look.host_alive, trouble=look.trouble)

    def _log_changes(self, before: Mapping[str, Any], controller: Controller) -> None:
        after = controller.replicas
        for name, replica in after.items():
            if name in before and replica.state != before[name].state:
                _log.info("replica_%s name=%s url=%s", replica.state, name, replica.url or "-")
        for name in before.keys() - after.keys():
            self._logged.pop(name, None)
            look = self._looked.get(name)
            why = look.trouble if look is not None and look.trouble else "-"
            _log.info("replica_gone name=%s was=%s reason=%r", name, before[name].state, why)

    def _write_status(self) -> None:
        shown = {
            "gateways": self._gateways.troubles(),
            "pools": {
                pool: {
                    "replicas": each.wanted,
                    "version": each.spec.version,
                    "failures": each.failures,
                    "last_failure": each.last_failure,
                    "is_settled": each.is_settled,
                    "members": [
                        {
                            "name": r.name, "version": r.version, "state": r.state, "url": r.url,
                            "up": r.up, "requests": r.requests, "trouble": r.trouble,
                        }
                        for r in each.replicas.values()
                    ],
                }
                for pool, each in self.controllers.items()
            },
        }  # fmt: skip
        if shown != self._shown:
            partial = self._folder / f"{STATUS}.part"
            try:
                write_private(partial, msgspec.json.encode(shown).decode())
                partial.replace(self._folder / STATUS)
            except OSError as error:
                # a full disk ends no controller
                if self._writes:
                    _log.warning("status_not_written reason=%r", str(error))
                self._writes = False
                return
            self._shown, self._writes = shown, True


async def _look_at(url: str) -> None:
    pool = Pool(Origin.of(url), connect_timeout=_LOOK_TIMEOUT, idle=1.0)
    try:
        await fetch(pool, "GET", "/health/live", [(FLEET_HEADER, b"1")], _LOOK_TIMEOUT)
    finally:
        pool.close()
