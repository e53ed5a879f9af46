"""HTTP/1.1 as bytes, for both drivers: writes requests, reads answers. Opens no sockets.

One connection carries one attempt, so that closing it cancels the attempt on the server.
"""

from __future__ import annotations

import ssl
from typing import Final
from urllib.parse import urlsplit

import httptools
import msgspec

from paceline.client.policy import Target
from paceline.client.steps import Broken, Closed, Data, Head, Input, Open

__all__ = ["Address", "AnswerReader"]

_MAX_HEAD_BYTES: Final = 64 * 1024


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
        self._parser = httptools.HttpResponseParser(self)
        self._inputs: list[Input] = []
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._in_head = True
        self._framed = False
        self._wall = 0.0

    def feed(self, data: bytes, wall: float) -> list[Input]:
        """Return the inputs in ``data``; no bytes: the server has closed. ``wall`` is unix time."""
        self._inputs = []
        self._wall = wall
        if not data:
            whole = not self._in_head and not self._framed
            return [Closed() if whole else Broken("the connection was closed")]
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._inputs.append(Broken("the answer is not HTTP"))
        if self._in_head and self._head_bytes > _MAX_HEAD_BYTES:
            self._inputs.append(Broken(f"the answer's head has over {_MAX_HEAD_BYTES} bytes"))
        return self._inputs

    # ---------------------------------------------------------------- of the parser

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        self._framed = self._framed or key in ("content-length", "transfer-encoding")
        self._headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._in_head = False
            self._inputs.append(Head(status, self._headers, self._wall))

    def on_body(self, data: bytes) -> None:
        self._inputs.append(Data(data))

    def on_message_complete(self) -> None:
        if not self._in_head:
            self._inputs.append(Closed())
