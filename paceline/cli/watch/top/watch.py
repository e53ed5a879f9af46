"""Readings of one address over HTTP, repeatedly, and the changes between them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from paceline.cli.watch.top.gateway_frame import GatewayFrame, make_gateway_frame
from paceline.errors import ConfigError
from paceline.server.observability.snapshot.frame import Frame, make_frame
from paceline.server.observability.snapshot.scrape import Scrape, parse_metrics

__all__ = ["Seen", "Source", "Watch", "fetch"]

_TIMEOUT: Final = 10.0
_MAX_BYTES: Final = 32 * 2**20


class Source:
    """The address of a server's or a gateway's metrics, and of a gateway's status.

    Args:
        address: ``host:port`` or a URL; without a path, /metrics is meant.
        api_key: sent as a bearer token; "" sends none.

    Raises:
        ConfigError: ``address`` is neither.
    """

    def __init__(self, address: str, api_key: str = "") -> None:
        parts = _checked(address)
        path = parts.path.rstrip("/") or "/metrics"
        self._api_key = api_key
        self.address = parts.netloc
        self.url = parts._replace(path=path).geturl()
        self._status_url = parts._replace(path=path.removesuffix("/metrics") + "/status").geturl()

    def fetch(self) -> str:
        """Return the metrics. Raises ConfigError, with what to do, when nothing usable comes."""
        return fetch(self.url, self._api_key, _TIMEOUT, _MAX_BYTES).decode("utf-8", "replace")

    def fetch_status(self) -> Mapping[str, Any]:
        """Return a gateway's status. Raises ConfigError, as ``fetch`` does."""
        text = fetch(self._status_url, self._api_key, _TIMEOUT, _MAX_BYTES)
        try:
            status = json.loads(text)
            if not isinstance(status["engines"], dict):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"what {self._status_url} answered is no gateway's status") from None
        found: Mapping[str, Any] = status
        return found


def fetch(url: str, api_key: str, timeout: float, max_bytes: int) -> bytes:
    """Return a server's response to a GET.

    Raises:
        ConfigError: ``url`` is not a URL, or nothing usable came; it says what to do.
    """
    parts = _checked(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    shown = parts._replace(query="").geturl()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = make(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("GET", parts._replace(scheme="", netloc="").geturl(), headers=headers)
        answer = connection.getresponse()
        body = answer.read(max_bytes)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(
            f"{shown} does not answer ({error or type(error).__name__}): is a server running there?"
        ) from None
    finally:
        connection.close()
    if answer.status in (401, 403):
        raise ConfigError(
            f"{shown} wants a key of scope admin in PACELINE_API_KEY (HTTP {answer.status})"
        )
    if answer.status != 200:
        raise ConfigError(f"{shown} answered HTTP {answer.status}, not what was asked for")
    return body


def _checked(address: str) -> SplitResult:
    """Parse an address. Raises ConfigError for a text that is not a server's address."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018
        # else looking it up would fail later
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ConfigError(f"{address!r} is not an address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{address!r} is not an address such as http://127.0.0.1:8000")
    return parts


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
