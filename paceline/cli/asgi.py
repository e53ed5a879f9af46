"""Calls an ASGI application in this process, without sockets.

An offline batch goes through the server's own routes this way, so a line means offline exactly what
it means to the server: same fields, same defaults, same errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["AsgiApp", "post"]

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


async def post(app: AsgiApp, path: str, body: bytes) -> tuple[int, bytes]:
    """POST a JSON body; the status and the whole body of the answer.

    Cancelling the task that awaits this cancels the application's handler.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    parts: list[bytes] = []

    async def receive() -> Message:
        if not unread:
            # this caller never hangs up; whoever waits for that waits until it is cancelled
            await asyncio.get_running_loop().create_future()
        return unread.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)
