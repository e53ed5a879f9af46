"""Readings of one address, one after another, and what happened in between."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.cli.top.gateway_frame import GatewayFrame, make_gateway_frame
from paceline.cli.top.scrape import Source
from paceline.core.errors import ConfigError
from paceline.server.readings import Frame, Scrape, make_frame, parse_metrics

__all__ = ["Seen", "Watch"]

# a gateway's metrics come with its status
_Reading = tuple[Scrape, Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Seen:
    """The latest of one address."""

    # as people name it, and where it is read
    address: str
    url: str
    # None: it has not answered yet
    frame: Frame | GatewayFrame | None
    # why ``frame`` is not the latest; "": it is
    problem: str = ""

    @property
    def kind(self) -> str:
        """What answers there: gateway, server, or nobody yet."""
        if self.frame is None:
            return "unknown"
        return "gateway" if isinstance(self.frame, GatewayFrame) else "server"


class Watch:
    """Of one address."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._before: _Reading | None = None
        self.seen = Seen(source.address, source.url, None)

    def look(self) -> Seen:
        """Read it once more. Raises ConfigError, with what to do, when nothing usable comes."""
        after = self._read()
        # a server that is asked for the first time has done nothing yet
        before = self._before or after
        self._before = after
        self.seen = Seen(self._source.address, self._source.url, _frame(before, after))
        return self.seen

    def look_again(self) -> Seen:
        """The same, but what was last seen stays where nothing comes: it may come back."""
        try:
            return self.look()
        except ConfigError as error:
            frame = self.seen.frame
            self.seen = Seen(self._source.address, self._source.url, frame, str(error))
            return self.seen

    def _read(self) -> _Reading:
        now = time.monotonic()
        scrape = parse_metrics(self._source.fetch(), now)
        return scrape, self._source.fetch_status() if scrape.is_gateway else None


def _frame(before: _Reading, after: _Reading) -> Frame | GatewayFrame:
    (then, status_then), (now, status) = before, after
    if status is None:
        return make_frame(then, now)
    return make_gateway_frame((then, status_then or status), (now, status))
