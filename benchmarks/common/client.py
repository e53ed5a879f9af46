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

__all__ = ["Answer", "Timing", "check_answered", "complete", "exchange", "get"]

_LIMIT = 1 << 20
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_Parts = AsyncIterator[bytes]


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


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, and its body as it comes."""

    status: int
    # names and values in lower case
    headers: Mapping[bytes, bytes]
    _parts: _Parts

    async def body(self) -> bytes:
        """Return the body."""
        return b"".join([part async for part in self._parts])

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the body, without their ends."""
        rest = b""
        async for part in self._parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest


@contextlib.asynccontextmanager
async def exchange(
    port: int, path: str, body: object = None, headers: Mapping[str, str] = NO_FIELDS
) -> AsyncIterator[Answer]:
    """Send a GET, or a POST of ``body`` as JSON, over a connection of its own, which is closed when
    the block ends. Raises OSError, ValueError or IncompleteReadError for an answer that is none."""
    data = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LIMIT)
    try:
        fields = {"Host": "127.0.0.1", "Connection": "close", **headers}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        method = "GET" if body is None else "POST"
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        await writer.drain()
        status, found = await _read_head(reader)
        yield Answer(status, found, _body(reader, found))
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]) -> _Parts:
    chunked = headers.get(b"transfer-encoding") == b"chunked"
    # negative: until the connection ends
    left = int(headers.get(b"content-length", b"-1"))
    while left:
        if chunked:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            data = await reader.readexactly(size) if size else b""
            await reader.readline()
        else:
            data = await reader.read(1 << 16)
        if not data:
            break
        left -= len(data)
        yield data
    if left > 0:
        raise asyncio.IncompleteReadError(b"", left)


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
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
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


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    """Read status and headers, in lower case. Raises ConnectionError if the server sent nothing."""
    line = await reader.readline()
    if not line:
        raise ConnectionError("closed without an answer")
    headers = {}
    while (entry := (await reader.readline()).strip()) != b"":
        name, _, value = entry.partition(b":")
        headers[name.lower()] = value.strip().lower()
    return int(line.split()[1]), headers


async def get(port: int, path: str, *, timeout: float = 5.0) -> tuple[int, bytes]:
    """Return status and body; status 0 if there was no answer in time."""
    try:
        async with asyncio.timeout(timeout), exchange(port, path) as answer:
            return answer.status, await answer.body()
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return 0, b""
