"""Lines of a pipe or a terminal, as soon as they arrive.

The writer may be slow, or wait for an answer before it writes the next line; the event loop
continues meanwhile.

This module does not know what a line is for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Final

__all__ = ["arriving_lines"]

_PIECE: Final = 64 * 1024


async def arriving_lines(file: int) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an open file, without their ends, each as soon as it is complete.

    Args:
        file: a descriptor that has no other reader; stays open.
    """
    # parts of the line that is not complete
    parts: list[bytes] = []
    while data := await _read(file):
        *ends, rest = data.split(b"\n")
        if ends:
            parts.append(ends[0])
            yield b"".join(parts)
            for line in ends[1:]:
                yield line
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


async def _read(file: int) -> bytes:
    """Wait for data and return it; empty at the end of the file."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(file, _tell, readable)
    except PermissionError:
        # a file on a disk cannot be watched, and is always readable
        return os.read(file, _PIECE)
    try:
        await readable
    finally:
        loop.remove_reader(file)
    return os.read(file, _PIECE)


def _tell(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
