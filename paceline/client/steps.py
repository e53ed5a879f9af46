"""Inputs and actions of a ``Machine``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.client.errors import ClientError
from paceline.client.events import Event

__all__ = [
    "Action",
    "Broken",
    "Close",
    "Closed",
    "Connected",
    "Data",
    "Emit",
    "Fail",
    "Head",
    "Input",
    "Open",
    "Request",
    "Start",
    "Tick",
]


@dataclass(frozen=True, slots=True)
class Start:
    """The call begins. The first input, once."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection that ``Open`` wants is open, and the request was sent."""


@dataclass(frozen=True, slots=True)
class Head:
    """An answer's status and headers, names in lower case."""

    status: int
    headers: Mapping[str, str]
    # unix time of its arrival, for dates in headers
    wall: float


@dataclass(frozen=True, slots=True)
class Data:
    """A part of the answer's body, without HTTP's framing."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """The answer is over: its framing or the connection ended."""


@dataclass(frozen=True, slots=True)
class Broken:
    """No connection could be opened, or it was lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time ``deadline`` has come."""


Input = Start | Connected | Head | Data | Closed | Broken | Tick


@dataclass(frozen=True, slots=True)
class Open:
    """Connect to a target and post a body. Nothing else is open."""

    # index of the target
    target: int
    # after the target's address and /v1, such as /chat/completions
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Close:
    """Drop the connection; further inputs from it belong to no attempt."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Give the caller an event."""

    event: Event


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise ``error``; the last action."""

    error: ClientError


Action = Open | Close | Emit | Fail


@dataclass(frozen=True, slots=True)
class Request:
    """A caller's request."""

    path: str
    # without model and stream
    body: Mapping[str, Any]
    # sent if the body has none, so that a resumed attempt draws as the first would have
    seed: int
    # parses the whole text; its result is ``Finished.parsed``
    parse: Callable[[str], object] | None = None
