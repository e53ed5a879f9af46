"""A client: one streamed completion over HTTP, timed, or any exchange. It does as little work
per token as possible, because client and server share the processors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.common.processes import Unavailable
from paceline.wire.response import Fault, Head, ResponseReader

__all__ = ["Answer", "Timing", "check_answered", "complete", "exchange", "get"]

_READ_BYTES = 1 << 16
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Timing:
    """Times at which a request's tokens arrived; seconds of ``time.monotonic``."""

    sent: float
    # arrival of each event with text or tokens; an event may carry several tokens
    events: tuple[float, ...]
    # as the server counted them
    output_tokens: int
    # empty: all is well
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between events."""
        return tuple(b - a for a, b in zip(self.events, self.events[1:], strict=False))


def check_answered(timings: Iterable[Timing]) -> None:
    """Raise Unavailable if a request failed."""
    errors = [timing.error for timing in timings if timing.error]
    if errors:
        raise Unavailable(f"{len(errors)} requests failed: {errors[0]}")


class Answer:
    """One answer on a connection that carries no other, read as it comes. Raises ConnectionError
    if the server closes the connection before the answer is complete, ValueError if it is not
    HTTP."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = ResponseReader()
        self._parts: list[bytes] = []
        self._is_over = False
        self.status = 0
        # names and values in lower case
        self.headers: dict[bytes, bytes] = {}

    async def read_head(self) -> Answer:
        """Read status and headers."""
        while not self.status:
            await self._read()
        return self

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the body, without their ends."""
        rest = b""
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line.rstrip(b"\r")
            if self._is_over:
                break
            await self._read()
        if rest:
            yield rest

    async def body(self) -> bytes:
        """Read the whole body."""
        while not self._is_over:
            await self._read()
        return b"".join(self._parts)

    async def _read(self) -> None:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            if not self._parser.ends_with_connection:
                what = "Incomplete" if self.status else "no"
                raise ConnectionError(f"{what} answer: the server closed the connection")
            self._is_over = True
            return
        for event in self._parser.feed(data):
            if isinstance(event, bytes):
                self._parts.append(event)
            elif isinstance(event, Head):
                self.status = event.status
                self.headers = {name: value.lower() for name, value in event.headers}
            elif isinstance(event, Fault):
                raise ValueError(event.why)
            else:
                self._is_over = True


@contextlib.asynccontextmanager
async def exchange(
    port: int, path: str, body: object = None, headers: Mapping[str, str] = NO_FIELDS
) -> AsyncIterator[Answer]:
    """Send a GET, or a POST of ``body`` as JSON, over a connection of its own, which is closed when
    the block ends. Raises OSError or ValueError for an answer
    that is broken."""
    data = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        fields = {"Host": "127.0.0.1", "Connection": "close", **headers}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        method = "GET" if body is None else "POST"
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        await writer.drain()
        yield await Answer(reader).read_head()
    finally:
        writer.close()


async def complete(
    port: int,
    model: str,
    prompt: list[int],
    max_tokens: int,
    *,
    timeout: float,
    fields: Mapping[str, Any] = NO_FIELDS,
    headers: Mapping[str, str] = NO_FIELDS,
) -> Timing:
    """Stream one greedy completion of exactly ``max_tokens``. Never raises: errors are in the
    result, whose ``output_tokens`` is then 0.

    Args:
        fields: more fields of the body, such as targets.
        headers: more headers.
    """
    sent = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            return await _complete(port, model, prompt, max_tokens, sent, fields, headers)
    except TimeoutError:
        return Timing(sent, (), 0, f"not done within {timeout:.0f} s")
    except (OSError, ValueError) as error:
        return Timing(sent, (), 0, f"{type(error).__name__}: {error}")


async def _complete(
    port: int,
    model: str,
    prompt: list[int],
    max_tokens: int,
    sent: float,
    fields: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    async with exchange(port, "/v1/completions", body, headers) as answer:
        if answer.status != 200:
            text = (await answer.body()).decode(errors="replace")
            raise ValueError(f"status {answer.status} {text[:200]}")
        return await _read_events(answer.lines(), sent, max_tokens)


async def _read_events(lines: AsyncIterator[bytes], sent: float, max_tokens: int) -> Timing:
    events: list[float] = []
    usage: dict[str, Any] = {}
    async for line in lines:
        if not line.startswith(b"data: {"):
            continue
        now = time.monotonic()
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(str(event["error"])[:200])
        usage = event.get("usage") or usage
        if event.get("choices"):
            events.append(now)
    tokens = usage.get("completion_tokens", 0)
    if tokens != max_tokens or not events:
        raise ValueError(f"asked for {max_tokens} tokens, got {tokens} in {len(events)} events")
    return Timing(sent, tuple(events), tokens)


async def get(port: int, path: str, *, timeout: float = 5.0) -> tuple[int, bytes]:
    """Return status and body; status 0 if there was no answer in time."""
    try:
        async with asyncio.timeout(timeout), exchange(port, path) as answer:
            return answer.status, await answer.body()
    except (OSError, TimeoutError, ValueError):
        return 0, b""
