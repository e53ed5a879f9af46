"""Time of a fleet's last request, by which a replica knows whether anything still watches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.http.fields import FLEET_HEADER

__all__ = ["Watched"]

# least and longest interval of the check, s
_SHORTEST: Final = 0.05
_LONGEST: Final = 1.0


class Watched:
    """ASGI application around another one that notes requests with the header of a fleet.

    Args:
        seconds: time without one after which nothing watches the replica.
    """

    def __init__(
        self, app: ASGIApp, seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._now = now
        self.seconds = seconds
        # interval at which to ask
        self.interval = min(_LONGEST, max(_SHORTEST, seconds / 4))
        self._seen_at = now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name == FLEET_HEADER for name, _ in scope["headers"]):
            self._seen_at = self._now()
        await self._app(scope, receive, send)

    @property
    def is_unwatched(self) -> bool:
        return self._now() - self._seen_at >= self.seconds
