"""Limits of a client's attempts: number, time and targets. Pure: time is an argument."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

__all__ = ["DEFAULT_POLICY", "Policy", "RetryBudget", "Target"]


def _shown(url: str) -> str:
    """Return any URL as an error may quote it: without user, password, query and fragment, which
    may be secrets. A password may hold any character, also those that end a host name."""
    shown = re.split("[?#]", url, maxsplit=1)[0]
    if "@" in url:
        start, slashes, _ = shown.partition("//")
        host = shown.rpartition("@")[2] if "@" in shown else "..."
        shown = f"{start if slashes and '@' not in start else ''}{slashes}***@{host}"
    return repr(shown[:200])


@dataclass(frozen=True, slots=True)
class Target:
    """A server and a model there. Raises ValueError for an invalid address."""

    # such as http://127.0.0.1:8000/v1; a trailing /v1 may be left out
    base_url: str
    model: str
    # sent as a bearer token; empty: none
    api_key: str = ""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            port = parts.port
            # otherwise looking it up would fail with an error that is not an OSError
            (parts.hostname or "").encode("idna")
        except ValueError:
            # the error text is not repeated, as a part of a password may be read as a port
            raise ValueError(
                f"base_url {_shown(self.base_url)} has no valid host or port"
            ) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError(f"base_url must be http(s)://host..., got {_shown(self.base_url)}")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("base_url has a user, a password, a query or a fragment")
        if any(ord(c) <= 32 or ord(c) > 126 for c in self.base_url + self.api_key):
            raise ValueError("base_url and api_key are printable ASCII without spaces")

    def __repr__(self) -> str:
        # logs and tracebacks must not show keys
        return f"Target({self.base_url!r}, {self.model!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of one call. Raises ValueError for a bad value."""

    # requests in all, to any target
    attempts: int = 3
    # seconds; each counts from the start of an attempt, but the total from that of the call
    connect_timeout: float = 5.0
    # until the first token, including the queue and the prompt
    first_token_timeout: float = 120.0
    # between two tokens; comments that keep a connection alive do not count
    gap_timeout: float = 30.0
    total_timeout: float = 600.0
    # the back-off before attempt n + 1 is drawn from 0 to base * 2 ** (n - 1), at most max
    backoff_base: float = 0.5
    backoff_max: float = 8.0
    # a server that asks for a longer wait gets no more attempts
    max_retry_after: float = 60.0
    # an answer that broke and cannot be resumed may begin again, which voids earlier output
    restart_allowed: bool = False
    # size of one event, such as the first, which may hold the prompt's ids
    max_event_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_event_bytes < 1024:
            raise ValueError("attempts must be at least 1, max_event_bytes at least 1024")
        for name in (
            "connect_timeout",
            "first_token_timeout",
            "gap_timeout",
            "total_timeout",
            "backoff_base",
            "backoff_max",
            "max_retry_after",
        ):
            seconds = getattr(self, name)
            low_enough = seconds >= 0 if name.startswith(("backoff", "max")) else seconds > 0
            if not (math.isfinite(seconds) and low_enough):
                raise ValueError(f"{name} must be a number of seconds, got {seconds}")


DEFAULT_POLICY: Final = Policy()

# most tokens that calls without retries can save up
_CAPACITY: Final = 100.0


class RetryBudget:
    """A token bucket over all calls of a client: retries cannot multiply a server's load.

    A call puts ``ratio`` in, a retry takes 1 out. The level rises to ``minimum`` by itself, by one
    a second, so that a client with few calls may retry too. Safe to share between threads.
    """

    def __init__(self, ratio: float = 0.1, minimum: float = 10.0) -> None:
        if not (0 <= ratio <= 1 and 0 <= minimum <= _CAPACITY):
            raise ValueError(f"ratio must be 0 to 1 and minimum 0 to {_CAPACITY:g}")
        self._ratio = ratio
        self._minimum = minimum
        self._level = minimum
        self._at = -math.inf
        self._lock = threading.Lock()

    def deposit(self) -> None:
        """Count a new call."""
        with self._lock:
            self._level = min(_CAPACITY, self._level + self._ratio)

    def take(self, now: float) -> bool:
        """Take one retry from the bucket; return whether there was one."""
        with self._lock:
            if now > self._at:
                if self._level < self._minimum and self._at > -math.inf:
                    self._level = min(self._minimum, self._level + now - self._at)
                self._at = now
            if self._level < 1:
                return False
            self._level -= 1
            return True
