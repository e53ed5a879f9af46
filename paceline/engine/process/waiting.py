"""Waiting for an event, with a time limit."""

from __future__ import annotations

import asyncio

__all__ = ["happens_within"]


async def happens_within(event: asyncio.Event, timeout: float) -> bool:
    """Whether ``event`` is set within ``timeout`` seconds; returns as soon as it is."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
