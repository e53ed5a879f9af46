"""A small server of another dialect: no usage, unknown fields refused, and misbehaviour on demand.

It answers /v1/chat/completions alone. Every ``period``-th request is treated as ``manners`` say.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["FakeServer", "start_fake"]

_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class FakeServer:
    """
    Args:
        manners: of the requests in turn: "good", "429", "cut", "garbage", "html", "hang", "close".
            The last two keep the connection, and close it without an answer.
        tokens: chunks of an answer.
        seconds: before each chunk.
    """

    def __init__(self, manners: Sequence[str], tokens: int, seconds: float) -> None:
        self.manners = manners
        self.tokens = tokens
        self.seconds = seconds
        self.port = 0
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self._turn = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        body = json.loads(await reader.readexactly(length))
        if "stream_options" in body:
            writer.write(_plain(400, {"error": {"message": "unknown field stream_options"}}))
            return True
        self.bodies.append(body)
        # the two that ask what a word takes come first
        manner = "good"
        if len(self.bodies) > 2:
            manner = self.manners[self._turn % len(self.manners)]
            self._turn += 1
        if manner == "429":
            writer.write(_plain(429, {"error": "slow down"}))
        elif manner == "html":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>")
        elif manner == "hang":
            await asyncio.sleep(30)
        elif manner == "close":
            return False
        else:
            return await self._stream(writer, manner)
        await writer.drain()
        return True

    async def _stream(self, writer: asyncio.StreamWriter, manner: str) -> bool:
        writer.write(_STREAM)
        for index in range(self.tokens):
            await asyncio.sleep(self.seconds)
            if index == 1 and manner == "cut":
                return False
            if index == 1 and manner == "garbage":
                writer.write(_chunk(b"data: \xff{\n\n"))
            finish = "stop" if index == self.tokens - 1 else None
            choice = {"delta": {"content": "x "}, "finish_reason": finish}
            writer.write(
                _chunk(b"data:" + json.dumps({"choices": [choice]}).encode() + b"\r\n\r\n")
            )
        writer.write(_chunk(b"data: [DONE]\r\n\r\n") + b"0\r\n\r\n")
        await writer.drain()
        return True


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@contextmanager
def start_fake(*manners: str, tokens: int = 4, seconds: float = 0.0) -> Iterator[FakeServer]:
    """One on a thread of its own, on a free port of 127.0.0.1."""
    fake = FakeServer(manners or ("good",), tokens, seconds)
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def main() -> None:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.port = server.sockets[0].getsockname()[1]
        ready.set()
        async with server:
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
