"""The output file of ``paceline generate``: records appended, resumable.

Lines are read and answered as in ``/v1/batches`` (``server/batches/lines.py``).

This module does not know how a request is answered.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import ConfigError
from paceline.files import make_private_folder, private_opener
from paceline.server.protocol.responses import encode

__all__ = ["OutputFile"]

# identity of a line: its custom id, or its index and digest
Key = tuple[str, str]

# start of every record; distinguishes a torn record from a file of other content
_START = b'{"index":'


class OutputFile:
    """Answers appended line by line; those of an earlier run are kept.

    A last line torn by a crash is cut off on opening. Each line is written to the operating system
    in one call, so a killed process loses no finished answer.
    """

    def __init__(
        self,
        file: BinaryIO,
        answered: frozenset[Key] = frozenset(),
        failed: frozenset[Key] = frozenset(),
    ) -> None:
        self._file = file
        # keys of answered lines, and of those answered with an error
        self.answered = answered
        self.failed = failed

    @classmethod
    def open(cls, path: Path, *, overwrite: bool = False, retry_failed: bool = False) -> OutputFile:
        """Open the file. Raises ConfigError where it holds other content than a batch's answers.

        Args:
            retry_failed: errors are removed from the file, so that their lines count as unanswered.
        """
        try:
            make_private_folder(path.parent)
            file: BinaryIO = os.fdopen(private_opener(str(path), os.O_RDWR | os.O_CREAT), "r+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        try:
            _lock(file, path)
            answered, failed, end = (frozenset(), frozenset(), 0) if overwrite else _scan(path)
            file.truncate(end)
            if retry_failed and failed:
                file = _without_failures(file, path)
                answered, failed, end = _scan(path)
            file.seek(end)
        except BaseException:
            file.close()
            raise
        return cls(file, answered, failed)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, whose first key is "index", and its newline in one write."""
        self._file.write(encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path} is being written by another process: wait for it") from None


def _without_failures(file: BinaryIO, path: Path) -> BinaryIO:
    """Replace the file atomically by a copy without its errors, locked too, and return that."""
    fresh = path.with_name(f".{path.name}.retry")
    copy = os.fdopen(private_opener(str(fresh), os.O_RDWR | os.O_CREAT | os.O_TRUNC), "r+b")
    try:
        _lock(copy, path)
        os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        file.seek(0)
        for raw in file:
            found = _read(raw)
            if found is not None and not found[1]:
                copy.write(raw)
        copy.flush()
        os.fsync(copy.fileno())
        os.replace(fresh, path)
    except BaseException:
        copy.close()
        fresh.unlink(missing_ok=True)
        raise
    file.close()
    return copy


def _scan(path: Path) -> tuple[frozenset[Key], frozenset[Key], int]:
    """Return the keys answered in ``path``, those answered with an error, and the bytes of its
    complete lines."""
    answered, failed = set(), set()
    end = 0
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            found = _read(raw)
            if found is None:
                if raw.endswith(b"\n") or not raw.startswith(_START[: len(raw)]):
                    raise ConfigError(
                        f"{path} line {number} is not an answer of 'paceline generate': choose "
                        "another output, or give --overwrite to replace this one"
                    )
                break  # torn: the write of the last line was cut short
            if not raw.endswith(b"\n"):
                break  # whole by chance, but its newline is missing
            key, is_error = found
            answered.add(key)
            if is_error:
                failed.add(key)
            end += len(raw)
    return frozenset(answered), frozenset(failed), end


def _read(raw: bytes) -> tuple[Key, bool] | None:
    """Return the key of a record's line, and whether it is an error; None: not a record."""
    try:
        record = json.loads(raw)
        response = record.get("response")
        is_error = record.get("error") is not None or (
            response is not None and response["status_code"] != 200
        )
        custom_id = record["custom_id"]
        if custom_id is not None:
            return ("id", str(custom_id)), is_error
        return (str(int(record["index"])), str(record["input"])), is_error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
