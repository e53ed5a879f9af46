"""The database of a batch folder: queries, pages, transactions; its errors are StorageErrors.

This module does not know what the tables mean.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.files import FILE_MODE, tighten
from paceline.http.errors import HttpError
from paceline.server.batches.contents import as_storage_errors

__all__ = ["BATCH_COLUMNS", "FILE_COLUMNS", "Database", "connect"]


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


_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    size INTEGER NOT NULL, created_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, window TEXT NOT NULL, status TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, times TEXT NOT NULL,
    metadata TEXT NOT NULL, errors TEXT NOT NULL,
    total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL,
    pending_bytes INTEGER NOT NULL, output_file_id TEXT, error_file_id TEXT,
    suspects TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, number);
CREATE INDEX IF NOT EXISTS batches_in ON batches (status);
CREATE TABLE IF NOT EXISTS results (
    batch_id TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
"""
FILE_COLUMNS: Final = "id, owner, filename, purpose, size, created_at"
BATCH_COLUMNS: Final = (
    "id, owner, endpoint, input_file_id, window, status, created_at, expires_at, times, metadata, "
    "errors, total, completed, failed, pending_bytes, output_file_id, error_file_id, suspects"
)
# version of the schema; a folder with another one is refused
_VERSION: Final = 1


def connect(path: Path) -> sqlite3.Connection:
    """Open a database with owner-only access, also if an earlier version let others read it.

    Raises sqlite3.Error, OSError, or ConfigError for a database of another version.
    """
    # SQLite creates its other files with the mode of this one
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        if each.exists():
            tighten(each)
    # one thread uses it at a time, but not always the same; transactions are begun explicitly
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.row_factory = sqlite3.Row
        # both must be set before tables exist
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        # a response is sent only once its row is durable
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise ConfigError(f"it was made by another version ({version}, not {_VERSION})")
        db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
    except BaseException:
        db.close()
        raise
    return db
