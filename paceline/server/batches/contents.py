"""Contents of files in one folder: complete and on disk, or absent.

A file is written as ``ID.part``, synced, and renamed; readers see nothing before that. Errors of
the disk become ``StorageError``, which names no path.

This module does not know what a file is used for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import BinaryIO, Final

from paceline.files import make_private_folder, private_opener, tighten
from paceline.http.errors import HttpError

__all__ = ["Contents", "Part", "StorageError", "as_storage_errors"]

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
