"""Code for all processes that the page's what-if starts (``cli/simulation/what_if.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import BinaryIO, Final

__all__ = ["MOST_LINE", "child_environment", "end_of_log", "kill", "ran_out_of_memory"]

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
