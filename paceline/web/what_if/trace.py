"""Traces that callers upload, received within bounds and checked by a separate process; and code
for all processes that the page's what-if starts (``cli/simulation/what_if.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Final

from starlette.requests import Request

from paceline.errors import InvalidRequestError
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.server.settings.config import WhatIfConfig

__all__ = [
    "MOST_LINE",
    "MOST_TRACE",
    "check_declared",
    "child_environment",
    "end_of_log",
    "kill",
    "ran_out_of_memory",
    "read_through",
    "receive",
]

# maximum bytes of a line that a child writes
MOST_LINE: Final = 2**20
# bytes at the end of its standard error that are read and logged
_LOGGED: Final = 2000
# last words of a child whose memory reached its limit
_OUT_OF_MEMORY: Final = (
    "MemoryError",
    "Memory allocation still failed",
    "bad_alloc",
    "failed to map segment",
    "Cannot allocate memory",
)
# variables that a child gets of this process's environment, which may hold secrets
_ENVIRONMENT: Final = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")


def child_environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    # one processor is enough for background work
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return kept | dict.fromkeys(threads, "1")


def kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def end_of_log(log: BinaryIO) -> str:
    """Return the end of a child's standard error, which is a file."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _LOGGED))
    return log.read().decode("utf-8", "replace")


def ran_out_of_memory(said: str) -> bool:
    return any(words in said for words in _OUT_OF_MEMORY)


_log = logging.getLogger("paceline.server")

# maximum size of an uploaded trace, bytes
MOST_TRACE: Final = 32 * 2**20
# bytes of an upload that are buffered before a write
_BUFFER: Final = 2**20
# limits of checking a trace: seconds of wall-clock time and of CPU time
_READ: Final = 60.0
_READ_CPU: Final = 20


def check_declared(request: Request) -> None:
    """Raise HttpError 413 if the body's declared length is too large."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > MOST_TRACE:
        raise _too_long(f"{declared[:20]} bytes")


async def receive(request: Request, file: int) -> int:
    """Write the request's body to an open file and close it; return the number of bytes.

    Raises:
        HttpError: 413, it is too long.
        InvalidRequestError: it is empty.
        ClientDisconnectedError: the caller hung up halfway.
    """
    size = 0
    with os.fdopen(file, "wb") as part:
        buffer, more = bytearray(), True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            buffer += message.get("body", b"")
            more = message.get("more_body", False)
            if size + len(buffer) > MOST_TRACE:
                raise _too_long(f"more than {MOST_TRACE} bytes")
            if len(buffer) >= _BUFFER or not more:
                size += len(buffer)
                await asyncio.to_thread(part.write, bytes(buffer))
                buffer.clear()
    if not size:
        raise InvalidRequestError("the trace is empty", "trace")
    return size


async def read_through(config: WhatIfConfig, trace: Path, root: Path | None) -> dict[str, Any]:
    """Check a trace, which may be long and hostile, in a separate process; return its number of
    requests. Returns nothing if the configuration names no such process.

    The process ends when this one does, and removes ``root`` then: its standard input stays open
    until it has answered.

    Raises:
        InvalidRequestError: the trace cannot be simulated, or takes too much to read.
        HttpError: 500, the process failed; the log says how.
    """
    if not config.check:
        return {}
    with tempfile.TemporaryFile(dir=trace.parent) as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *config.check,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
                limit=MOST_LINE,
            )
        except OSError as failure:
            # no error here: a job that cannot be started reports it
            _log.warning("what_if_unread reason=%r", str(failure))
            return {}
        asked = {
            "path": str(trace),
            "root": str(root),
            "memory": config.memory,
            "seconds": _READ_CPU,
        }
        said, code = await _answer(process, json.dumps(asked).encode() + b"\n")
        told = _answered(said)
        if told is None:
            raise _unanswered(code, log, config.memory)
    if "error" in told:
        raise InvalidRequestError(str(told["error"]), "trace")
    return told


async def _answer(process: asyncio.subprocess.Process, asked: bytes) -> tuple[bytes, int]:
    """Return (output line, exit code). Raises InvalidRequestError after the time limit."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(asked)
    try:
        async with asyncio.timeout(_READ):
            return await process.stdout.readline(), await process.wait()
    except TimeoutError:
        raise InvalidRequestError(
            f"it takes more than {_READ:g} s to read the trace", "trace"
        ) from None
    finally:
        if process.returncode is None:
            kill(process)
            await process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()


def _answered(said: bytes) -> dict[str, Any] | None:
    """Return the answer about the trace; None if the process ended without one."""
    try:
        told = json.loads(said)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _unanswered(code: int, log: BinaryIO, memory: int) -> Exception:
    """Return the error for a process that ended without an answer: the trace exceeded a limit, or
    the process has a bug."""
    said = end_of_log(log)
    limit = ""
    if code == -signal.SIGXCPU:
        limit = f"{_READ_CPU} s of processor time"
    elif ran_out_of_memory(said):
        limit = f"{memory // 2**20} MiB"
    if limit:
        return InvalidRequestError(f"the trace takes more than {limit} to read", "trace")
    _log.error("what_if_check_failed code=%d log=%r", code, said)
    return HttpError(
        500,
        f"the process that reads traces failed (code {code}): a fault of this server, which says "
        "nothing about the trace. The server's log says more",
    )


def _too_long(got: str) -> HttpError:
    return HttpError(413, f"a trace may have {MOST_TRACE} bytes, got {got}")
