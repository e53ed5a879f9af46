"""Lines of a pipe or a terminal, as they come.

Whoever writes them may take its time, or wait for an answer before it writes the next one; the
event loop goes on meanwhile.

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
    """The lines of an open file, without their ends, each as soon as it is whole.

    Args:
        file: a descriptor that nobody else reads meanwhile; stays open.
    """
    # of the line whose end has not come
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
    """What there is, once there is something; nothing at the end."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(file, _tell, readable)
    except PermissionError:
        # a file on a disk, of which the system does not tell: it is there
        return os.read(file, _PIECE)
    try:
        await readable
    finally:
        loop.remove_reader(file)
    return os.read(file, _PIECE)


def _tell(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
