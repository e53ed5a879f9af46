"""Ledger of what every key has spent, by day, model and engine: in memory, backed by SQLite.

No request waits for the file: a thread writes changed rows every second and at the end. A gateway
that is killed loses its last second of spending. The file holds no prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import ConfigError
from paceline.gateway.settings.prices import Used

__all__ = ["Ledger", "Spent"]

_log = logging.getLogger("paceline.gateway")

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS spend (
    key TEXT NOT NULL, day TEXT NOT NULL, engine TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, amount INTEGER NOT NULL,
    PRIMARY KEY (key, day, engine, model)
) WITHOUT ROWID
"""
# bound of a stored value: the most that one request may cost, a million of the currency. SQLite has
# 63 bits, so that nine such rows can be summed
_MOST: Final = 10**18
# adds to the stored counts, as another gateway may share the file
_ADD: Final = f"""
INSERT INTO spend VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key, day, engine, model) DO UPDATE SET
    requests = requests + excluded.requests,
    prompt_tokens = MIN(prompt_tokens + excluded.prompt_tokens, {_MOST}),
    cached_tokens = MIN(cached_tokens + excluded.cached_tokens, {_MOST}),
    output_tokens = MIN(output_tokens + excluded.output_tokens, {_MOST}),
    amount = MIN(amount + excluded.amount, {_MOST})
"""
# summed in two parts, as the sum of amounts may exceed SQLite's integers
_SUMS: Final = """
SELECT key, CASE WHEN day >= ? THEN day ELSE '' END AS since,
    SUM(CAST(amount AS INTEGER) / 1000000), SUM(CAST(amount AS INTEGER) % 1000000)
FROM spend GROUP BY key, since
"""
_EVERY_SECONDS: Final = 1.0
# days kept apart in memory; older ones only count for budgets that never end
_DAYS: Final = 62
_BUSY_SECONDS: Final = 2.0

_Row = tuple[str, str, str, str]


@dataclass(slots=True)
class Spent:
    """Spending of one key, day, engine and model."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    amount: int = 0

    def add(self, used: Used, amount: int, requests: int) -> None:
        self.requests += requests
        self.prompt += used.prompt
        self.cached += used.cached
        self.output += used.output
        self.amount += amount


class Ledger:
    """Ledger of one gateway. Call ``start`` on its event loop, and ``close`` at the end.

    Args:
        path: the file, created if it is missing; None: memory alone.

    Raises:
        ConfigError: the file cannot be opened, or is not a ledger.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._unwritten: dict[_Row, Spent] = {}
        # key -> day -> amount
        self._totals: dict[str, dict[str, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        if path is not None:
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            # created with this mode before SQLite opens it: spending is private
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            with contextlib.closing(self._open()) as database:
                database.execute("PRAGMA journal_mode=WAL")
                database.execute(_TABLE)
                oldest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=_DAYS)
                sums = database.execute(_SUMS, (oldest.date().isoformat(),))
                for key, day, millions, rest in sums:
                    self._totals.setdefault(key, {})[day] = millions * 1_000_000 + rest
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"spend_storage: {path} cannot be used: {error}") from None

    def _open(self) -> sqlite3.Connection:
        assert self._path is not None, "there is a file"
        return sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)

    def start(self) -> None:
        if self._path is not None and self._task is None:
            self._task = asyncio.ensure_future(self._write_now_and_then())

    def add(
        self,
        key: str,
        day: str,
        engine: str,
        model: str,
        used: Used,
        amount: int,
        requests: int = 1,
    ) -> None:
        """Add a request that has ended; ``requests``: 0 for a further engine's part of it."""
        days = self._totals.setdefault(key, {})
        days[day] = days.get(day, 0) + amount
        if self._path is not None:
            self._unwritten.setdefault((key, day, engine, model), Spent()).add(
                used, amount, requests
            )

    def spent(self, key: str, since: str) -> int:
        """Return what a key has spent since the day ``since`` ("": ever)."""
        days = self._totals.get(key, {})
        return sum(amount for day, amount in days.items() if day >= since)

    def spent_on(self, day: str) -> Mapping[str, int]:
        """Return the day's spending of every key that spent anything."""
        return {key: days[day] for key, days in self._totals.items() if day in days}

    async def close(self) -> None:
        """Write what was spent until now, if the file can be written."""
        if self._task is not None:
            self._closing.set()
            await self._task
            await self._flush()

    async def _write_now_and_then(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _EVERY_SECONDS)
            await self._flush()

    async def _flush(self) -> None:
        if not self._unwritten:
            return
        rows, self._unwritten = self._unwritten, {}
        try:
            refused = await asyncio.to_thread(self._write, rows)
        except Exception as error:
            # nothing was written, so the next try must include these rows
            _log.error("spend_not_written rows=%d error=%r", len(rows), str(error)[:100])
            for row, spent in rows.items():
                kept = self._unwritten.setdefault(row, Spent())
                for name in Spent.__slots__:
                    setattr(kept, name, getattr(kept, name) + getattr(spent, name))
            return
        for row, why in refused:
            _log.error("spend_row_refused row=%r spent=%r error=%r", row, rows[row], why)

    def _write(self, rows: Mapping[_Row, Spent]) -> Sequence[tuple[_Row, str]]:
        """Write all rows or none, except rows that the file can never hold: return those, and
        why."""
        refused = []
        with contextlib.closing(self._open()) as database:
            database.execute("BEGIN IMMEDIATE")
            for row, spent in rows.items():
                counts = (min(getattr(spent, name), _MOST) for name in Spent.__slots__)
                try:
                    database.execute(_ADD, (*row, *counts))
                except sqlite3.OperationalError:
                    # the fault is the file's, not the row's: it is full, locked or read-only
                    raise
                except (sqlite3.Error, ValueError, OverflowError) as error:
                    refused.append((row, str(error)[:100]))
            database.execute("COMMIT")
        return refused
