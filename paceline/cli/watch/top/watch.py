"""Repeated readings of one address, and the changes between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.cli.watch.top.gateway_frame import GatewayFrame, make_gateway_frame
from paceline.cli.watch.top.scrape import Source
from paceline.errors import ConfigError
from paceline.server.observability.snapshot.frame import Frame, make_frame
from paceline.server.observability.snapshot.scrape import Scrape, parse_metrics

__all__ = ["Seen", "Watch"]

# a gateway's metrics, with its status
_Reading = tuple[Scrape, Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Seen:
    """Latest reading of one address."""

    # address as the user named it, and the URL that is read
    address: str
    url: str
    # None: no answer yet
    frame: Frame | GatewayFrame | None
    # reason why ``frame`` is not the latest; "": it is
    problem: str = ""

    @property
    def kind(self) -> str:
        """Kind of program at the address: "gateway", "server", or "unknown" without an answer."""
        if self.frame is None:
            return "unknown"
        return "gateway" if isinstance(self.frame, GatewayFrame) else "server"


class Watch:
    """Reader of one address."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._before: _Reading | None = None
        self.seen = Seen(source.address, source.url, None)

    def look(self) -> Seen:
        """Read again. Raises ConfigError, with what to do, when nothing usable comes."""
        after = self._read()
        # the first reading has none before it, and shows no activity
        before = self._before or after
        self._before = after
        self.seen = Seen(self._source.address, self._source.url, _frame(before, after))
        return self.seen

    def look_again(self) -> Seen:
        """Read again, but keep the last frame when nothing comes, since the server may return."""
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
