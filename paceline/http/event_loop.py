"""The event loop of what reads streams: uvloop's where it is installed.

The server does not ask for one: writing many streams costs no less there (ADR 1).
"""

from __future__ import annotations

import asyncio

__all__ = ["new_event_loop"]


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop where it is installed (the extra ``uvloop``), else asyncio's."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
