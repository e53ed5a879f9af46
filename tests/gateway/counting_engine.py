"""An engine that makes what the text of a request says, and heeds the limits that it is sent.

The text is JSON: ``make`` tokens for each answer, ``cut`` the connection behind so many, for as
many engines as ``cuts`` says, ``stall`` behind so many, ``refuse`` with a status, or be ``late``.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from tests.gateway.fault_server import PACELINE_METRICS

__all__ = ["CountingEngine", "counting", "prompt_tokens"]

_HEAD: Final = {"id": "x", "created": 1, "model": "m"}


def prompt_tokens(text: str) -> int:
    return max(1, len(text) // 5)


class CountingEngine:
    """One of several that count together what each request was sent."""

    def __init__(self, sent: Counter[str], context: int | None) -> None:
        self.url = ""
        self._sent, self._context = sent, context
        # limits that came, by the request's text
        self.limits: dict[str, int | None] = {}
        self.writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            while line := await reader.readline():
                length = 0
                while (header := (await reader.readline()).strip().lower()) != b"":
                    if header.startswith(b"content-length:"):
                        length = int(header[15:])
                body = await reader.readexactly(length)
                if not await self._answer(reader, writer, line.split()[1].decode(), body):
                    break
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, data: bytes
    ) -> bool:
        """Whether the connection goes on."""
        if path == "/metrics":
            _whole(writer, 200, PACELINE_METRICS.encode())
            return True
        if path == "/v1/models":
            entry = {"id": "m", "max_model_len": self._context}
            _whole(writer, 200, {"data": [entry]})
            return True
        if not data:
            _whole(writer, 404, {})
            return True
        body = json.loads(data)
        text = _text_of(body)
        told = json.loads(text)
        self._sent[text] += 1
        await asyncio.sleep(told.get("late", 0.0) if self._sent[text] == 1 else 0.0)
        if status := told.get("refuse"):
            _whole(writer, status, {"error": {"message": "no"}})
            return True
        prompt = prompt_tokens(text)
        if path == "/v1/embeddings":
            usage = {"prompt_tokens": prompt, "total_tokens": prompt}
            _whole(writer, 200, {"data": [], "model": "m", "usage": usage})
            return True
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        limits = [body[name] for name in names if body.get(name) is not None]
        self.limits[text] = limit = max(limits, default=None)
        room = 10**9 if self._context is None else self._context - prompt
        made = min(told["make"], limit or 10**9, room)
        if body.get("stream"):
            goes_on = self._stream(writer, body, told, text, made)
            if not goes_on and "stall" in told:
                # until its caller has hung up
                await writer.drain()
                await reader.read(1)
            return goes_on
        if told.get("cuts", 0) >= self._sent[text]:
            return False
        num = max(body.get("n", 1), body.get("best_of", 1))
        _whole(writer, 200, _answered(path, prompt, made * num))
        return True

    def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], told: Any, text: str, made: int
    ) -> bool:
        begun = len(body.get("resume_output_ids", ()))
        prompt = prompt_tokens(text)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        first = {"index": 0, "delta": {"role": "assistant"}, "prompt_token_ids": [1] * prompt}
        _event(writer, {**_HEAD, "choices": [first]})
        cuts = told.get("cuts", 0) >= self._sent[text]
        for number in range(begun, made):
            if (cuts and number - begun >= told["cut"]) or number >= told.get("stall", made):
                return False
            choice = {"index": 0, "delta": {"content": "a"}, "token_ids": [number]}
            _event(writer, {**_HEAD, "choices": [choice]})
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        usage = {"prompt_tokens": prompt, "completion_tokens": made}
        _event(writer, {**_HEAD, "choices": [end]})
        _event(writer, {**_HEAD, "choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True


def _text_of(body: dict[str, Any]) -> str:
    found = body.get("input") or body.get("prompt") or body["messages"][0]["content"]
    assert isinstance(found, str)
    return found


def _answered(path: str, prompt: int, made: int) -> dict[str, Any]:
    if path in ("/v1/messages", "/v1/responses"):
        return {"id": "x", "usage": {"input_tokens": prompt, "output_tokens": made}}
    return {**_HEAD, "choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": made}}


def _event(writer: asyncio.StreamWriter, what: Any) -> None:
    data = b"data: " + json.dumps(what).encode() + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: int, what: Any) -> None:
    body = what if isinstance(what, bytes) else json.dumps(what).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)


@asynccontextmanager
async def counting(sent: Counter[str], context: int | None = None) -> AsyncIterator[CountingEngine]:
    engine = CountingEngine(sent, context)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()
        for writer in list(engine.writers):
            writer.transport.abort()
