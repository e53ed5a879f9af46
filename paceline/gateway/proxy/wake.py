"""Signal that wakes a request's task: ``asyncio.Event`` for one task, at half its cost."""

from __future__ import annotations

import asyncio

__all__ = ["Wake"]


class Wake:
    """Signal for the one task that waits for it."""

    __slots__ = ("_waiter", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task, now or as soon as it waits."""
        self.is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until it is set, and clear it."""
        if not self.is_set:
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                # a cancelled wait may end after the next one has begun
                if self._waiter is waiter:
                    self._waiter = None
        self.is_set = False
