"""The database of a batch folder: queries, pages, transactions; its errors are StorageErrors.

This module does not know what the tables mean.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Any

from paceline.http.errors import HttpError
from paceline.server.batches.contents import as_storage_errors
from paceline.server.batches.schema import connect

__all__ = ["Database"]


class Database:
    """One open database, used from one thread at a time. Raises what ``connect`` raises."""

    def __init__(self, path: Path) -> None:
        self._db = connect(path)

    def interrupt(self) -> None:
        """Make the running query fail soon. Callable from any thread."""
        with contextlib.suppress(sqlite3.Error):
            self._db.interrupt()

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def execute(self, query: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Run a query within ``transaction`` or ``as_storage_errors``. Raises sqlite3.Error."""
        return self._db.execute(query, values)

    def row(self, query: str, *values: Any) -> Any:
        """Return the first row, or None. Raises StorageError."""
        with as_storage_errors():
            return self._db.execute(query, values).fetchone()

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Return all rows. Raises StorageError."""
        with as_storage_errors():
            return self._db.execute(query, values).fetchall()

    def page(
        self,
        columns: str,
        table: str,
        owner: str,
        after: str | None,
        limit: int,
        newest_first: bool,
        condition: tuple[str, str] | None = None,
    ) -> tuple[list[Any], bool]:
        """Return an owner's rows in order of creation, and whether there are more.

        Args:
            after: id of the row before the first.
            condition: more SQL, which begins with AND, and its value.

        Raises:
            HttpError: 404 if there is no row ``after``; or StorageError.
        """
        also = ""
        values: list[Any] = [owner]
        if condition is not None:
            also = condition[0]
            values.append(condition[1])
        if after is not None:
            row = self.row(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", after, owner)
            if row is None:
                raise HttpError(404, f"after={after[:80]!r} is not stored here")
            also += f" AND number {'<' if newest_first else '>'} ?"
            values.append(row["number"])
        rows = self.rows(
            f"SELECT {columns} FROM {table} WHERE owner = ? {also} ORDER BY number "
            f"{'DESC' if newest_first else 'ASC'} LIMIT ?",
            *values,
            limit + 1,
        )
        return rows[:limit], len(rows) > limit

    @contextlib.contextmanager
    def transaction(self) -> Generator[None, None, None]:
        """Commit the whole block or nothing; durable on return. Raises StorageError."""
        with as_storage_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # after a full disk SQLite has rolled back already
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
