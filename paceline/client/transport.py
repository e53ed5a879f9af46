"""HTTP/1.1 as bytes, for both drivers: writes requests, reads answers. Opens no sockets.

One connection carries one attempt, so that closing it cancels the attempt on the server.
"""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

import msgspec

from paceline.client.policy import Target
from paceline.client.steps import Broken, Closed, Data, Head, Input, Open
from paceline.wire import response
from paceline.wire.response import Fault, ReadEvent, ResponseReader

__all__ = ["Address", "AnswerReader"]


class Address:
    """Address of a target, and the requests for it."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.base_url)
        self.host = parts.hostname or ""
        tls = parts.scheme == "https"
        self.port = parts.port or (443 if tls else 80)
        self.tls = ssl.create_default_context() if tls else None
        base = parts.path.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._head = (
            f"Host: {host}:{self.port}\r\nAccept: text/event-stream\r\nConnection: close\r\n"
            "Content-Type: application/json\r\nUser-Agent: paceline-client\r\n"
        )
        if target.api_key:
            self._head += f"Authorization: Bearer {target.api_key}\r\n"

    def request(self, action: Open) -> bytes:
        """Return the whole request, head and body."""
        body = msgspec.json.encode(action.body)
        line = f"POST {self._base}{action.path} HTTP/1.1\r\n"
        return f"{line}{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class AnswerReader:
    """Turns the bytes of one connection into inputs of a ``Machine``."""

    def __init__(self) -> None:
        self._reader = ResponseReader()

    def feed(self, data: bytes, wall: float) -> list[Input]:
        """Return the inputs in ``data``; no bytes: the server has closed. ``wall`` is unix time."""
        if not data:
            is_end = self._reader.ends_with_connection
            return [Closed() if is_end else Broken("the connection was closed")]
        return [_input_of(event, wall) for event in self._reader.feed(data)]


def _input_of(event: ReadEvent, wall: float) -> Input:
    if isinstance(event, bytes):
        return Data(event)
    if isinstance(event, Fault):
        return Broken(event.why)
    if isinstance(event, response.Head):
        text = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers]
        return Head(event.status, dict(text), wall)
    return Closed()
