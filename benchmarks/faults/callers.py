"""Clients that record their exchanges: the status, every token, and the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.client import exchange

__all__ = ["Seen", "ask", "counted", "mismatches"]


@dataclass(slots=True)
class Seen:
    """One exchange from the client's side."""

    # HTTP status; 0: the connection broke before there was one
    status: int = 0
    # by choice: token ids, and finish reasons
    ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    # names and arguments of tool calls, one after the other
    calls: str = ""
    # every choice ended, and the stream ended with [DONE]
    finished: bool = False
    # whether a gateway continued it at another engine
    resumed: bool = False
    # status in the error, as an event or a body; 0: none
    error: int = 0
    message: str = ""
    retry_after: float | None = None
    # seconds of time.monotonic(): of each event with tokens, and the end
    times: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        """Token ids of all choices, one after the other."""
        return [i for index in sorted(self.ids) for i in self.ids[index]]

    def longest_gap(self, after: float = 0.0) -> float:
        """Return the longest time without a token, of those that ended after ``after``."""
        gaps = (b - a for a, b in zip(self.times, self.times[1:], strict=False) if b > after)
        return max(gaps, default=0.0)

    @property
    def outcome(self) -> str:
        """Kind of outcome in a few words, for counting."""
        if self.status == 200 and self.finished and not self.error:
            return "200 complete"
        if self.status == 200:
            return f"200 then error {self.error}" if self.error else "200 then broken off"
        return str(self.status) if self.status else "no answer"


async def ask(
    port: int, body: Mapping[str, Any], *, path: str = "/v1/completions", timeout: float = 60.0
) -> Seen:
    """POST a request with ``return_token_ids``; never raises for errors of the server."""
    seen = Seen()
    try:
        async with asyncio.timeout(timeout):
            await _ask(port, path, body, seen)
    except (OSError, TimeoutError, ValueError) as error:
        seen.message = seen.message or f"{type(error).__name__}: {error}"
    seen.ended = time.monotonic()
    return seen


async def _ask(port: int, path: str, body: Mapping[str, Any], seen: Seen) -> None:
    async with exchange(port, path, {"return_token_ids": True, **body}) as answer:
        seen.status = answer.status
        if b"retry-after" in answer.headers:
            seen.retry_after = float(answer.headers[b"retry-after"])
        if answer.status == 200 and body.get("stream"):
            async for line in answer.lines():
                if line == b"data: [DONE]":
                    seen.finished = not seen.error
                elif line.startswith(b"data: "):
                    _note(seen, json.loads(line[6:]))
            return
        _note(seen, json.loads(await answer.body()))
        seen.finished = answer.status == 200


def _note(seen: Seen, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error, seen.message = event["error"].get("code") or 500, event["error"]["message"]
    seen.resumed = seen.resumed or "resumed" in (event.get("paceline") or {})
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or ()
        if ids:
            seen.times.append(time.monotonic())
        seen.ids.setdefault(choice["index"], []).extend(ids)
        for call in (choice.get("delta") or {}).get("tool_calls") or ():
            seen.calls += call["function"].get("name") or ""
            seen.calls += call["function"].get("arguments") or ""
        if choice.get("finish_reason"):
            seen.ends[choice["index"]] = choice["finish_reason"]


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
