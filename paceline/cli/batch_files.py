"""The output file of ``paceline generate``: records appended, resumable.

Lines are read and answered as those of ``/v1/batches`` (``server/batches/lines.py``).

This module does not know how a request is answered.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from paceline.checkpoints.private import make_private_folder, private_opener
from paceline.core.errors import ConfigError
from paceline.server.wire import encode

__all__ = ["OutputFile"]

# every record begins so; tells a torn record from somebody's notes
_START = b'{"index":'


class OutputFile:
    """Answers, appended line by line; what an earlier run wrote stays.

    A last line torn by a crash is cut off on opening. Each line is handed to the operating system
    whole, so a killed process loses no finished answer.
    """

    def __init__(self, file: BinaryIO, answered: frozenset[tuple[str, str]] = frozenset()) -> None:
        self._file = file
        # keys of the lines that have an answer
        self.answered = answered

    @classmethod
    def open(cls, path: Path, *, overwrite: bool = False) -> OutputFile:
        """Raises ConfigError when the file holds something else than a batch's answers."""
        try:
            make_private_folder(path.parent)
            file = os.fdopen(private_opener(str(path), os.O_RDWR | os.O_CREAT), "r+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        try:
            _lock(file, path)
            answered, end = (frozenset(), 0) if overwrite else _scan(path)
            file.truncate(end)
            file.seek(end)
        except BaseException:
            file.close()
            raise
        return cls(file, answered)

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


def _scan(path: Path) -> tuple[frozenset[tuple[str, str]], int]:
    """Keys answered in ``path``, and the length of its whole lines in bytes."""
    answered = set()
    end = 0
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            key = _answered_key(raw)
            if key is None:
                if raw.endswith(b"\n") or not raw.startswith(_START[: len(raw)]):
                    raise ConfigError(
                        f"{path} line {number} is not an answer of 'paceline generate': name "
                        "another output, or give --overwrite to replace this one"
                    )
                break  # torn: the write of the last line was cut short
            if not raw.endswith(b"\n"):
                break  # whole by chance, but its newline is missing
            answered.add(key)
            end += len(raw)
    return frozenset(answered), end


def _answered_key(raw: bytes) -> tuple[str, str] | None:
    try:
        record = json.loads(raw)
        custom_id = record["custom_id"]
        if custom_id is not None:
            return ("id", str(custom_id))
        return (str(int(record["index"])), str(record["input"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
