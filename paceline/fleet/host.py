"""The machines where replicas run, as a driver sees them, and a fake of memory alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.fleet.controller import Command
from paceline.fleet.spec import PoolSettings

__all__ = ["FakeHost", "Host", "Look"]


@dataclass(frozen=True, slots=True)
class Look:
    """Report of a host on one replica."""

    version: str
    # "": it is not ready yet
    url: str = ""
    # None: its host does not answer
    alive: bool | None = True
    # False: its host is known to be dead
    host_alive: bool | None = None
    # why it is not ready, or not there any more
    trouble: str = ""


class Host(Protocol):
    """The machines where replicas run. Every call ends soon, whatever they do."""

    async def look(self) -> Mapping[str, Look]:
        """Return all replicas by name. Those that another controller started are among them, and
        those that have ended and were not forgotten yet."""
        ...

    async def start(self, command: Command, pool: PoolSettings) -> None:
        """Start a replica. If that fails, ``look`` says why."""
        ...

    async def end(self, name: str, *, kill: bool) -> None:
        """Ask a replica to end. With ``kill`` end it at once, and forget it once it has ended."""
        ...

    async def close(self) -> None:
        """Let go of the machines; replicas run on."""
        ...


class FakeHost:
    """Replicas in memory, ready as soon as they are looked at a second time."""

    def __init__(self, url: str = "http://replica/{}") -> None:
        self.replicas: dict[str, Look] = {}
        # versions that end while they start
        self.broken: set[str] = set()
        self._url = url

    async def look(self) -> Mapping[str, Look]:
        seen = dict(self.replicas)
        for name, each in seen.items():
            if each.alive and each.version in self.broken:
                self.replicas[name] = replace(each, alive=False, trouble="it is broken")
            elif each.alive and not each.url:
                self.replicas[name] = replace(each, url=self._url.format(name))
        return seen

    async def start(self, command: Command, pool: PoolSettings) -> None:
        self.replicas[command.name] = Look(command.version)

    async def end(self, name: str, *, kill: bool) -> None:
        if kill or not self.replicas[name].alive:
            self.replicas.pop(name, None)
        else:
            self.replicas[name] = replace(self.replicas[name], alive=False)

    async def close(self) -> None:
        self.replicas.clear()
