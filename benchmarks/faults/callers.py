"""Clients that record their exchanges: the status, every token, and the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.client import body_lines, read_head

__all__ = ["Seen", "ask", "counted", "mismatches"]

_LIMIT = 1 << 20


@dataclass(slots=True)
class Seen:
    """One exchange from the client's side."""

    # HTTP status; 0: the connection broke before there was one
    status: int = 0
    token_ids_of: dict[int, list[int]] = field(default_factory=dict)
    # every choice ended, and the stream ended with [DONE]
    finished: bool = False
    # status in the error, as an event or a body; 0: none
    error: int = 0
    message: str = ""
    retry_after: float | None = None
    # seconds of time.monotonic(): first token, end
    first_token: float | None = None
    last_token: float = 0.0
    ended: float = 0.0
    # seconds between two events with tokens
    longest_gap: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        """Token ids of all choices, one after the other."""
        return [i for index in sorted(self.token_ids_of) for i in self.token_ids_of[index]]

    @property
    def outcome(self) -> str:
        """Kind of outcome in a few words, for counting."""
        if self.status == 200 and self.finished and not self.error:
            return "200 complete"
        if self.status == 200:
            return f"200 then error {self.error}" if self.error else "200 then broken off"
        return str(self.status) if self.status else "no answer"


async def ask(port: int, body: Mapping[str, Any], *, timeout: float = 60.0) -> Seen:
    """POST a completion with ``return_token_ids``; never raises for errors of the server."""
    seen = Seen()
    try:
        async with asyncio.timeout(timeout):
            await _ask(port, body, seen)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        seen.message = seen.message or f"{type(error).__name__}: {error}"
    seen.ended = time.monotonic()
    return seen


async def _ask(port: int, body: Mapping[str, Any], seen: Seen) -> None:
    data = json.dumps({"return_token_ids": True, **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LIMIT)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        await writer.drain()
        status, headers = await read_head(reader)
        seen.status = status
        if b"retry-after" in headers:
            seen.retry_after = float(headers[b"retry-after"])
        lines = body_lines(reader, headers.get(b"transfer-encoding") == b"chunked")
        if status == 200 and body.get("stream"):
            async for line in lines:
                if line == b"data: [DONE]":
                    seen.finished = not seen.error
                elif line.startswith(b"data: "):
                    _note(seen, json.loads(line[6:]))
            return
        text = b"\n".join([line async for line in lines])
        _note(seen, json.loads(text))
        seen.finished = status == 200
    finally:
        writer.close()


def _note(seen: Seen, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error, seen.message = event["error"]["code"], event["error"]["message"]
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or ()
        if ids:
            now = time.monotonic()
            if seen.first_token is None:
                seen.first_token = now
            else:
                seen.longest_gap = max(seen.longest_gap, now - seen.last_token)
            seen.last_token = now
        seen.token_ids_of.setdefault(choice["index"], []).extend(ids)


def counted(seen: Iterable[Seen]) -> dict[str, int]:
    """Count exchanges by outcome."""
    return dict(sorted(Counter(each.outcome for each in seen).items()))


def mismatches(seen: Iterable[tuple[Seen, list[int]]]) -> int:
    """Count answers with a token lost, doubled or changed: whole ones that are not the expected
    one, and broken ones that are not its beginning."""
    return sum(
        each.token_ids != expected[: len(each.token_ids)]
        or (each.finished and len(each.token_ids) != len(expected))
        for each, expected in seen
    )
