"""What the page's what-if has in common for each process that it starts (``cli/what_if.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import BinaryIO, Final

__all__ = ["MOST_LINE", "child_environment", "end_of_log", "kill", "ran_out_of_memory"]

# bytes of one line that a child writes
MOST_LINE: Final = 2**20
# bytes of its standard error that are looked at and logged
_LOGGED: Final = 2000
# what a child says at last whose memory is at its limit
_OUT_OF_MEMORY: Final = (
    "MemoryError",
    "Memory allocation still failed",
    "bad_alloc",
    "failed to map segment",
    "Cannot allocate memory",
)
# what a child is given of this process's environment, which may hold secrets
_ENVIRONMENT: Final = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")


def child_environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    # one processor is enough for what others do not use
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return kept | dict.fromkeys(threads, "1")


def kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def end_of_log(log: BinaryIO) -> str:
    """The last of what a child wrote to its standard error, a file."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _LOGGED))
    return log.read().decode("utf-8", "replace")


def ran_out_of_memory(said: str) -> bool:
    return any(words in said for words in _OUT_OF_MEMORY)
