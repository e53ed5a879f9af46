"""Replicas as processes of this host, without Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.fleet.controller import Command
from paceline.fleet.host import Look
from paceline.fleet.replica import Record, read_records, start_replica
from paceline.fleet.spec import PoolSettings, lacks

__all__ = ["ProcessHost", "capacity"]


def capacity() -> Mapping[str, float]:
    """Return what this host has. GPUs are not counted: a Ray cluster knows its own."""
    return {"CPU": float(os.cpu_count() or 1)}


class ProcessHost:
    """Replicas of this host; see ``Host``.

    Args:
        folder: where their files lie; this object alone writes there.
        environ: their environment.
    """

    def __init__(
        self, folder: Path, exit_unwatched: float, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._folder = folder
        self._exit_unwatched = exit_unwatched
        self._environ = dict(environ)
        self._records = {each.name: each for each in read_records(folder)}
        # name -> (version, why it was not started)
        self._refused: dict[str, tuple[str, str]] = {}

    async def look(self) -> Mapping[str, Look]:
        found = {name: self._seen(each) for name, each in self._records.items()}
        for name, (version, why) in self._refused.items():
            found[name] = Look(version, alive=False, trouble=why)
        return found

    def _seen(self, record: Record) -> Look:
        if record.lives():
            return Look(record.version, record.url(self._folder))
        last = record.last_words(self._folder)
        return Look(record.version, alive=False, trouble=f"its process ended: {last}")

    async def start(self, command: Command, pool: PoolSettings) -> None:
        free = dict(capacity())
        for record in self._records.values():
            for name, amount in record.resources.items():
                free[name] = free.get(name, 0.0) - amount
        if missing := lacks(pool.resources, free):
            self._refused[command.name] = command.version, f"this host lacks {', '.join(missing)}"
            return
        try:
            self._records[command.name] = start_replica(
                self._folder, command.name, command.args, command.version,
                exit_unwatched=self._exit_unwatched, resources=pool.resources,
                environ=self._environ,
            )  # fmt: skip
        except OSError as error:
            self._refused[command.name] = command.version, f"it cannot be started: {error}"

    async def end(self, name: str, *, kill: bool) -> None:
        self._refused.pop(name, None)
        record = self._records.get(name)
        if record is None:
            return
        record.end(kill=kill)
        if kill and not record.lives():
            record.forget(self._folder)
            del self._records[name]

    async def close(self) -> None:
        """Let go; replicas run on, and their files with them."""
