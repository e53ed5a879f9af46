"""Scripted servers: what a stream looks like, as bytes, and a real one that fails as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# text of each token; the ids are 100, 101, ...
WORDS = ("The ", "sum", " is ", "", "4\u00e9\u4e2d", "\n\n", "\U0001f600.")
PROMPT_IDS = [1, 2, 3]
FIRST_ID = 100
TEXT = "".join(WORDS)


def sse(*chunks: dict[str, Any] | str) -> bytes:
    texts = (c if isinstance(c, str) else json.dumps(c, ensure_ascii=False) for c in chunks)
    return b"".join(f"data: {text}\n\n".encode() for text in texts)


def chat_stream(body: dict[str, Any], *, ids: bool = True, resumes: bool = True) -> bytes:
    """The whole answer to ``body``: a chunk for each token, counts, [DONE].

    Args:
        ids: whether the server knows ``return_token_ids``.
        resumes: whether it knows ``resume_output_ids``; else it begins again, as vLLM would.
    """
    ids = ids and bool(body.get("return_token_ids"))
    before = len(body.get("resume_output_ids", ())) if resumes else 0
    continuous = body["stream_options"].get("continuous_usage_stats")

    def chunk(count: int, **fields: Any) -> dict[str, Any]:
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        told = {"usage": usage} if continuous or not fields["choices"] else {}
        return {"id": "chatcmpl-1", "model": "m", **fields, **told}

    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    prompt = {"prompt_token_ids": PROMPT_IDS} if ids else {}
    chunks = [chunk(before, choices=[role], **prompt)]
    for number, word in list(enumerate(WORDS))[before:]:
        reason = "stop" if number == len(WORDS) - 1 else None
        choice: dict[str, Any] = {"index": 0, "delta": {"content": word}, "finish_reason": reason}
        if ids:
            choice["token_ids"] = [FIRST_ID + number]
        chunks.append(chunk(number + 1, choices=[choice]))
    chunks.append(chunk(len(WORDS), choices=[]))
    return sse(*chunks, "[DONE]")


@dataclass(frozen=True)
class Reply:
    """One answer of a real server.

    ``body`` None: the stream to the request. ``cut`` bytes of it are sent; then the connection is
    closed, or left open if ``stall``.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    cut: int | None = None
    stall: bool = False
    # close only the sending half, and go on reading
    half_close: bool = False
    # raw bytes instead of all of the above
    raw: bytes | None = None


class ScriptedServer:
    """Answers the n-th request with ``replies[n]``, and whole streams when they are used up."""

    def __init__(self, replies: Sequence[Reply], stream: Callable[[dict[str, Any]], bytes]) -> None:
        self._replies = list(replies)
        self._stream = stream
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        # set when a peer has hung up on a reply that stalls
        self.hung_up = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.hung_up.set()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split()[0])
        body = json.loads(await reader.readexactly(length))
        self.heads.append(head)
        self.bodies.append(body)
        reply = self._replies.pop(0) if self._replies else Reply()
        data = reply.raw
        if data is None:
            payload = self._stream(body) if reply.body is None else reply.body
            kind = "text/event-stream" if reply.status == 200 else "application/json"
            lines = {"Content-Type": kind, "Content-Length": str(len(payload))} | reply.headers
            text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            payload = payload[: reply.cut]
            data = f"HTTP/1.1 {reply.status} X\r\n{text}\r\n".encode() + payload
        writer.write(data)
        await writer.drain()
        if reply.half_close:
            writer.write_eof()
        if reply.stall or reply.half_close:
            assert await reader.read() == b""
            self.hung_up.set()


@contextlib.contextmanager
def scripted_server(
    *replies: Reply, stream: Callable[[dict[str, Any]], bytes] = chat_stream
) -> Iterator[ScriptedServer]:
    """A real server on a thread."""
    server = ScriptedServer(replies, stream)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
