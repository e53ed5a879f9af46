"""Streams whose engine is killed, stopped or cut off under them, through the gateway.

Two servers of one model, a gateway before them, and before one of them a relay that can cut all its
connections. 64 streams of six kinds: greedy, sampled, with penalties, held to a JSON schema, a tool
call, two choices. Each is sent once to a server without faults; then again through the gateway, and
the fault hits the first server while they run. Answers whose ids differ from those without faults
have lost, doubled or changed tokens. A pause is the longest time without a token after the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.client import get
from benchmarks.common.processes import Unavailable
from benchmarks.common.server import PacelineServer, ReadyServer
from benchmarks.common.statistics import percentile
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.faults.callers import Seen, ask
from benchmarks.faults.rows import KINDS as SERVER_KINDS

__all__ = ["FAULTS", "failover"]

STREAMS = 64
TOKENS = 96
FAULTS = ("SIGKILL", "SIGSTOP", "cut")
_PLACES = {"enum": ["north by north-west of the old harbour", "south-east of the long bridge"]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at places.",
        "parameters": {
            "type": "object",
            "properties": {"place": _PLACES, "also": _PLACES},
            "required": ["place", "also"],
        },
    },
}
# the kinds of a single server's faults, and a tool call
KINDS: tuple[dict[str, Any], ...] = (
    *SERVER_KINDS,
    {
        "temperature": 0.8,
        "seed": 10,
        "tools": [_TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
)


def _body(index: int) -> dict[str, Any]:
    numbers = ", ".join(str(number) for number in range(10 * index, 10 * index + 12))
    return {
        "messages": [{"role": "user", "content": f"Go on: {numbers},"}],
        "max_tokens": TOKENS,
        "stream": True,
        **KINDS[index % len(KINDS)],
    }


async def _stream(port: int, index: int) -> Seen:
    return await ask(port, _body(index), path="/v1/chat/completions", timeout=120)


class _Relay:
    """TCP relay before a server, whose connections can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        self._writers -= {writer, back}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


def failover(
    flags: Sequence[str],
    times: int,
    faults: Sequence[str],
    until: float,
    log_dir: Path,
    unmeasured: Unmeasured,
) -> dict[str, Any]:
    """Play each fault ``times`` times on servers started with ``flags``, or as often as possible
    until ``until`` (of ``time.monotonic()``), at least once. ``unmeasured`` gets the faults that
    could not be played. Raises Unavailable if none could be."""
    return asyncio.run(_failover(flags, times, faults, until, log_dir, unmeasured))


async def _failover(
    flags: Sequence[str],
    times: int,
    faults: Sequence[str],
    until: float,
    log_dir: Path,
    unmeasured: Unmeasured,
) -> dict[str, Any]:
    start = [*flags, "--log-level", "warning"]
    second = PacelineServer(*start, log=log_dir / "second.log")
    rows = {
        fault: {
            "times": 0,
            "streams": 0,
            "lost_tokens": 0,
            "doubled_tokens": 0,
            "failed": 0,
            "resumed": 0,
        }
        for fault in faults
    }
    pauses: dict[str, list[float]] = {fault: [] for fault in faults}
    try:
        unhurt = await asyncio.gather(*(_stream(second.port, i) for i in range(STREAMS)))
        if any(not each.finished for each in unhurt):
            messages = [each.message for each in unhurt if each.message]
            raise Unavailable(f"an unhurt server failed: {messages}")
        # in turns, so that a lack of time affects all faults alike
        longest = 0.0
        for number in range(times):
            began = time.monotonic()
            if number and began + longest > until:
                break
            for fault in faults:
                with unmeasured.part(f"failover {' '.join(flags)}, {fault}"):
                    log = log_dir / f"{fault}-{number}.log"
                    seen, at = await _once(start, second.port, fault, log)
                    rows[fault]["times"] += 1
                    for each, expected in zip(seen, unhurt, strict=True):
                        _count(rows[fault], each, expected)
                        if each.resumed:
                            pauses[fault].append(each.longest_gap(at))
            longest = max(longest, time.monotonic() - began)
    finally:
        second.close(grace=0.0)
    told = {fault: {**rows[fault], **_pauses(pauses[fault])} for fault in faults}
    for fault, row in told.items():
        print(f"  {fault:8} {row}", file=sys.stderr, flush=True)
    totals: dict[str, Any] = {
        name: sum(row[name] for row in rows.values())
        for name in ("streams", "lost_tokens", "doubled_tokens", "failed")
    }
    everybodys = _pauses([pause for found in pauses.values() for pause in found])
    return {**totals, **everybodys, "rows": told}


def _count(row: dict[str, int], seen: Seen, expected: Seen) -> None:
    lost, doubled = _differs(seen, expected)
    row["streams"] += 1
    row["lost_tokens"] += lost
    row["doubled_tokens"] += doubled
    whole = seen.finished and not seen.message
    same = seen.calls == expected.calls and seen.ends == expected.ends
    row["failed"] += not (whole and same)
    row["resumed"] += seen.resumed


def _pauses(found: Sequence[float]) -> dict[str, float]:
    if not found:
        return {}
    return {
        "pause_p50_s": round(percentile(found, 0.5), 3),
        "pause_p99_s": round(percentile(found, 0.99), 3),
    }


async def _once(
    flags: Sequence[str], second: int, fault: str, log: Path
) -> tuple[list[Seen], float]:
    """Play one fault under all streams; return what they received, and the fault's time."""
    first = await asyncio.to_thread(PacelineServer, *flags, log=log)
    relay = _Relay(first.port)
    gateway = None
    try:
        async with relay.open():
            argv = (
                sys.executable, "-m", "paceline.cli.main", "gateway", "--log-level", "error",
                "--engine", f"http://127.0.0.1:{relay.port}",
                "--engine", f"http://127.0.0.1:{second}", "--port", "0",
            )  # fmt: skip
            ready = r"^paceline gateway ready: \S+:(\d+)/v1 "
            gateway = await asyncio.to_thread(
                ReadyServer, argv, ready, log.with_suffix(".gateway"), seconds=30
            )
            streams = [asyncio.ensure_future(_stream(gateway.port, i)) for i in range(STREAMS)]
            await _half_way(gateway.port)
            at = time.monotonic()
            if fault == "cut":
                relay.cut()
            else:
                os.kill(first.pid, getattr(signal, fault))
            return list(await asyncio.gather(*streams)), at
    finally:
        if fault == "SIGSTOP":
            os.kill(first.pid, signal.SIGCONT)
        if gateway is not None:
            gateway.close(grace=0.0)
        first.close(grace=0.0)


async def _half_way(port: int) -> None:
    """Wait until the streams at the first engine are well under way."""
    await asyncio.sleep(0.2)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        _, body = await get(port, "/metrics")
        name = b'paceline:gateway_time_to_first_token_seconds_count{engine="engine1"} '
        _, found, rest = body.partition(name)
        if found and float(rest.split(b"\n")[0]) >= STREAMS // 4:
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)


def _differs(seen: Seen, expected: Seen) -> tuple[int, int]:
    """Return the numbers of missing or wrong tokens, and of surplus tokens."""
    lost = doubled = 0
    for index, ids in expected.ids.items():
        mine = seen.ids.get(index, [])
        same = sum(a == b for a, b in zip(mine, ids, strict=False))
        lost += len(ids) - same
        doubled += max(0, len(mine) - len(ids))
    return lost, doubled
