"""The tables of a batch folder, and the code that opens them."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

from paceline.errors import ConfigError
from paceline.files import FILE_MODE, tighten

__all__ = ["BATCH_COLUMNS", "FILE_COLUMNS", "connect"]

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
