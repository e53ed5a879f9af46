"""Bounds on the size, depth, number and duration of callers' input."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from paceline.errors import ConfigError, InvalidRequestError

__all__ = ["DEFAULT_BOUNDS", "MAX_JSON_DEPTH", "Bounds", "check_json_depth", "check_json_items"]

# depth for which the parsers of schemas, templates and bodies are written
MAX_JSON_DEPTH: Final = 64
# strings in JSON, also unclosed ones
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one server, per connection or request. Raises ConfigError for a bad value."""

    # request line and headers together
    max_head_bytes: int = 64 * 1024
    # header lines of a request
    max_headers: int = 128
    # most sockets open at once; further ones are answered 503
    max_connections: int = 4096
    # seconds for a complete request to arrive, from its first byte or the connection's start, the
    # later, and one more for every 4 KiB of it; 0: no limit
    receive_timeout: float = 60.0
    # seconds that a connection may stay open between two requests: longer than proxies and clients
    # keep one in their pool, which would else send a request just as it is closed
    keep_alive_timeout: float = 120.0
    # most levels of nested lists and objects
    max_json_depth: int = MAX_JSON_DEPTH
    # most entries of all lists and objects of a body together
    max_json_items: int = 500_000

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_head_bytes", 1024, 2**30),
            ("max_headers", 8, 100_000),
            ("max_connections", 1, 1_000_000),
            ("max_json_depth", 1, MAX_JSON_DEPTH),
            ("max_json_items", 16, 2**31),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be {low} to {high}, got {value}")
        for name in ("receive_timeout", "keep_alive_timeout"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"{name} must be 0 or more seconds, got {seconds}")


# shared default; frozen
DEFAULT_BOUNDS: Final = Bounds()


def check_json_items(body: bytes | bytearray, limit: int, what: str = "the request body") -> None:
    """Raise InvalidRequestError if the JSON in ``body`` may have more than ``limit`` entries.

    Called before parsing: two million empty lists are 6 MB of JSON and 150 MB of memory. Every
    entry but the first of a container has a comma before it, so commas and opening brackets outside
    of strings bound their number from above.
    """
    if _marks(body) <= limit:
        return
    # most of them may be commas in strings
    found = _marks(_STRING.sub(b"", body))
    if found > limit:
        raise InvalidRequestError(
            f"{what} has about {found} entries in lists and objects, at most {limit} are allowed"
        )


def _marks(data: bytes | bytearray) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def check_json_depth(value: dict[str, Any], limit: int, what: str = "the request body") -> None:
    """Raise InvalidRequestError if ``value`` has more than ``limit`` levels, itself included."""
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise InvalidRequestError(f"{what} is nested deeper than {limit} levels")
