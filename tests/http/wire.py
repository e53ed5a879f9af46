"""A connection of the front doors without a socket: bytes in, what its application saw and what
came back out."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httptools
import uvicorn
from uvicorn.server import ServerState

from paceline.http.bounds import Bounds
from paceline.http.connections import Connection
from paceline.http.slow_readers import SlowReaders

__all__ = ["Answer", "Wire"]


class _Transport(asyncio.Transport):
    """Keeps what is written, and closes as asyncio's do: nothing is written afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


@dataclass
class Answer:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


class _Answers:
    """What a client reads, interim answers left out."""

    def __init__(self) -> None:
        self.whole: list[Answer] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.at_hand = Answer()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.at_hand.headers[name] = value

    def on_headers_complete(self) -> None:
        self.at_hand.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.at_hand.body += body

    def on_message_complete(self) -> None:
        if self.at_hand.status >= 200:
            self.whole.append(self.at_hand)


class Wire:
    """One connection over an application that tells each request's path back.

    ``early`` of those paths are answered before their body is read; ``stuck``: none is, until its
    caller hangs up.
    """

    def __init__(
        self, early: frozenset[str] = frozenset(), stuck: bool = False, **bounds: Any
    ) -> None:
        self.early, self.stuck = early, stuck
        # of each request: method, path, headers, body; None, where it did not come
        self.seen: list[tuple[str, str, dict[bytes, bytes], bytes | None]] = []
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
        )
        config.load()
        # whether the server closed it
        self.closed = False
        self.transport = _Transport()
        self.connection = Connection(
            config,
            ServerState(),
            {},
            bounds=Bounds(**bounds),
            readers=SlowReaders(),
            slow_reader_timeout=0.0,
        )
        self.connection.connection_made(self.transport)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        parts, more, index = [], True, len(self.seen)
        self.seen.append((scope["method"], scope["path"], dict(scope["headers"]), None))
        while more and scope["path"] not in self.early:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message["body"])
            more = message["more_body"]
        if not more:
            self.seen[index] = (*self.seen[index][:3], b"".join(parts))
        if self.stuck:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        # an answer takes a moment, in which more comes in
        await asyncio.sleep(0)
        text = json.dumps(scope["path"]).encode()
        length = (b"content-length", b"%d" % len(text))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": text})

    async def feed(self, *segments: bytes) -> None:
        """Each as the transport would bring it: none while reading is paused or after a close."""
        for segment in segments:
            for _ in range(100):
                if self.transport.closed or not self.transport.is_paused:
                    break
                await asyncio.sleep(0)
            if self.transport.closed:
                return
            assert not self.transport.is_paused, "reading is paused for ever"
            self.connection.data_received(segment)
            await asyncio.sleep(0)

    async def settle(self) -> list[Answer]:
        """All answers, once the requests that are whole have theirs; the caller hangs up then."""
        for _ in range(2000):
            if self.transport.closed or self.connection.cycle is None or self.stuck:
                break
            if self.connection.cycle.response_complete and not self.connection.pipeline:
                break
            await asyncio.sleep(0)
        answers = _Answers()
        answers.parser.feed_data(bytes(self.transport.written))
        tasks = list(self.connection.tasks)
        self.closed = self.transport.closed
        self.connection.connection_lost(None)
        if tasks:
            await asyncio.wait(tasks)
        return answers.whole
