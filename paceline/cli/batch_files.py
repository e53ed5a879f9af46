"""The files of an offline batch: JSON lines in, JSON lines out, resumable.

Each non-blank input line is one request, in one of three forms::

    {"prompt": "Once upon a time", "max_tokens": 64}
    {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

The first two may carry a ``custom_id`` too. An answer is found again by its ``custom_id``, else by
line number and a digest of the line, so that answers to another input are noticed, not reused.

This module does not know how a request is answered.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.core.errors import ConfigError

__all__ = ["BatchLine", "OutputFile", "read_lines"]

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
# every record begins so; tells a torn record from somebody's notes
_START = b'{"index": '


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of a batch, or what is wrong with its line."""

    # number of the line in the input, from 0, blank lines counted
    index: int
    # custom_id as given, or None
    custom_id: str | None
    # first 16 hex digits of the line's SHA-256
    digest: str
    # endpoint and body; "" and {} when error is set
    url: str = ""
    body: dict[str, Any]
    # the line was {custom_id, method, url, body}
    is_openai: bool = False
    error: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the request across runs."""
        if self.custom_id is not None:
            return ("id", self.custom_id)
        return (str(self.index), self.digest)


def read_lines(source: Iterable[bytes]) -> Iterator[BatchLine]:
    """Parse input lines one at a time; a bad line becomes a BatchLine with ``error``."""
    seen: dict[str, int] = {}
    for index, raw in enumerate(source):
        text = raw.strip()
        if not text:
            continue
        line = _parse(index, text)
        if line.custom_id is not None and line.error is None:
            first = seen.setdefault(line.custom_id, index)
            if first != index:
                line = BatchLine(
                    index=index,
                    # not under the id of the line that has it: that one's answer is its own
                    custom_id=None,
                    digest=line.digest,
                    body={},
                    error=f"custom_id {line.custom_id!r} is already that of line {first + 1}",
                )
        yield line


def _parse(index: int, text: bytes) -> BatchLine:
    digest = hashlib.sha256(text).hexdigest()[:16]
    custom_id: str | None = None

    def bad(message: str) -> BatchLine:
        return BatchLine(index=index, custom_id=custom_id, digest=digest, body={}, error=message)

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return bad(f"not JSON: {error}")
    if not isinstance(value, dict):
        return bad(f"a line must be a JSON object, got {type(value).__name__}")
    given_id = value.pop("custom_id", None)
    if given_id is not None and not isinstance(given_id, str):
        return bad(f"custom_id must be a string, got {given_id!r}")
    custom_id = given_id
    if "body" in value:
        url, body, method = value.get("url"), value["body"], value.get("method", "POST")
        if url not in (CHAT_URL, COMPLETIONS_URL) or method != "POST":
            return bad(f"only POST {CHAT_URL} and {COMPLETIONS_URL}, got {method!r} {url!r}")
        if not isinstance(body, dict):
            return bad(f"body must be an object, got {type(body).__name__}")
    elif "messages" in value and "prompt" not in value:
        url, body = CHAT_URL, value
    elif "prompt" in value and "messages" not in value:
        url, body = COMPLETIONS_URL, value
    else:
        return bad("a line needs exactly one of 'prompt', 'messages' or 'body'")
    if body.get("stream"):
        return bad("stream is for servers: leave it out here")
    return BatchLine(
        index=index,
        custom_id=custom_id,
        digest=digest,
        url=url,
        body=body,
        is_openai="body" in value,
    )


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
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
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
        self._file.write(
            json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        )
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
