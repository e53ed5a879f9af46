"""The contents of a batch folder's files, and its database: queries, pages, transactions. Errors of
both are StorageErrors.

This module does not know what the tables mean.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

from paceline.errors import ConfigError
from paceline.files import FILE_MODE, make_private_folder, private_opener, tighten
from paceline.http.errors import HttpError

__all__ = [
    "BATCH_COLUMNS",
    "FILE_COLUMNS",
    "Contents",
    "Database",
    "Part",
    "StorageError",
    "as_storage_errors",
    "connect",
]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SUFFIX: Final = ".part"


class StorageError(HttpError):
    """The disk is full or does not answer; nothing of the operation was stored."""

    @classmethod
    def of(cls, error: OSError | sqlite3.Error) -> StorageError:
        """Return a 507 for a full disk, a 503 for any other error."""
        if isinstance(error, OSError):
            full = error.errno in _FULL
        else:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        if full:
            return cls(507, "the disk that files and batches are stored on is full")
        return cls(503, "the storage of files and batches does not work for now")


@contextlib.contextmanager
def as_storage_errors() -> Generator[None, None, None]:
    """Turn errors of the disk and the database into StorageError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StorageError.of(error) from error


class Contents:
    """One folder with owner-only access, created if absent. Raises OSError if it cannot be."""

    def __init__(self, folder: Path) -> None:
        make_private_folder(folder)
        tighten(folder)
        self._folder = folder

    def begin(self, file_id: str) -> Part:
        """Return a new file to write. Raises StorageError."""
        return Part(self._folder, file_id)

    def write(self, file_id: str, lines: Iterable[bytes]) -> int:
        """Write a file of lines, given without line ends; return its size. Raises StorageError."""
        part = self.begin(file_id)
        try:
            for line in lines:
                part.write(line)
                part.write(b"\n")
            part.keep()
        finally:
            part.drop()
        return part.size

    def open(self, file_id: str) -> BinaryIO:
        """Open a file to read; it may be removed while open. Raises StorageError."""
        with as_storage_errors():
            return (self._folder / file_id).open("rb")

    def remove(self, file_id: str) -> None:
        """Remove a file. If that fails it is a stray, removed when the folder is opened again."""
        with contextlib.suppress(OSError):
            (self._folder / file_id).unlink()

    def remove_strays(self, known: Collection[str]) -> None:
        """Remove all files except ``known``."""
        for path in self._folder.iterdir():
            if path.name not in known:
                self.remove(path.name)


class Part:
    """A file that is being written; ``keep`` or ``drop`` ends it."""

    def __init__(self, folder: Path, file_id: str) -> None:
        self.id = file_id
        self.size = 0
        self._folder = folder
        self._path = folder / f"{file_id}{_SUFFIX}"
        self._kept = False
        with as_storage_errors():
            self._file = open(self._path, "xb", opener=private_opener)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises StorageError."""
        with as_storage_errors():
            self._file.write(data)
        self.size += len(data)

    def keep(self) -> None:
        """Complete the file: it is on disk under its name on return. Raises StorageError."""
        with as_storage_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, self._folder / self.id)
            folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._kept = True

    def drop(self) -> None:
        """Delete the file; after ``keep`` do nothing."""
        if self._kept:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        for path in (self._path, self._folder / self.id):
            with contextlib.suppress(OSError):
                path.unlink()


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
