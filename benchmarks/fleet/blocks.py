"""Prompts that are not computed again: after a restart, at another engine, in a stream that moves.

    python -m benchmarks.fleet.blocks [restart] [hit] [moves]

Method. SmolLM2-135M in the formats that ``serve`` chooses, prompts of 4,096 random tokens, greedy.
Each server has answered another prompt before, so that it has measured its steps; each figure is
the median of ``ROUNDS`` (default 2) turns, first one way and then the other.

* ``restart``: first token of a prompt computed (``ttft_cold``), and of the same prompt after the
  server was stopped with SIGTERM and started again with the same ``--kv-store`` (``ttft_store``).
* ``hit``: first token of a prompt computed, and of one that another engine has computed, fetched
  over ``MBIT`` (default 1000) Mbit/s: a relay in this process holds the rate.
* ``moves``: a stream of such a prompt is cut after 8 tokens and goes on at another engine; the gap
  is the time from the last token there to the first one here, with blocks fetched (``gap_fetch``)
  and with all computed (``gap_compute``). Then, with the null backend, 32 streams of 200 tokens are
  moved between two engines at random times, ``MOVES`` (default 1000) times in all: ``lost`` and
  ``doubled`` count tokens that differ from the uncut answer's, which arithmetic tells.

``same``: the tokens behind fetched blocks were those behind computed ones. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.common.client import exchange
from benchmarks.common.ours import our_places
from benchmarks.common.processes import Unavailable
from benchmarks.common.server import PacelineServer
from benchmarks.common.statistics import percentile
from paceline.backends.reference.null import expected_tokens
from paceline.bench.machine import machine

__all__ = ["PARTS", "hit", "moves", "restart"]

ROUNDS: Final = int(os.environ.get("ROUNDS", "2"))
MBIT: Final = float(os.environ.get("MBIT", "1000"))
MOVES: Final = int(os.environ.get("MOVES", "1000"))
LENGTH: Final = 4096
# ids that every vocabulary here has as ordinary tokens
_IDS: Final = range(3, 250)
_KEY: Final = "benchmark"
_STREAMS: Final = 32
_NULL_VOCAB: Final = 259


class Made(NamedTuple):
    """Token ids of a stream, and when each event that had some arrived."""

    ids: list[int]
    times: list[float]
    sent: float

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


def prompt(draw: random.Random, length: int = LENGTH) -> list[int]:
    """Return random tokens."""
    return draw.choices(_IDS, k=length)


async def stream(
    port: int, tokens: list[int], count: int, *, stop_at: int | None = None, **fields: Any
) -> Made:
    """Stream a greedy answer; hang up after ``stop_at`` of its tokens. Raises Unavailable."""
    made = Made([], [], time.monotonic())
    body = {
        "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, **fields,
    }  # fmt: skip
    async with exchange(port, "/v1/completions", body) as answer:
        if answer.status != 200:
            raise Unavailable(f"status {answer.status}: {(await answer.body())[:200]!r}")
        async for line in answer.lines():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise Unavailable(str(event["error"])[:200])
            ids = [i for choice in event["choices"] for i in choice.get("token_ids") or ()]
            if ids:
                made.times.append(time.monotonic())
                made.ids.extend(ids)
            if stop_at is not None and len(made.ids) >= stop_at:
                break
    return made


async def source_of(port: int, at: int | None = None) -> dict[str, Any]:
    """Return the field ``kv_source`` for what this server has; ``at``: another port for it."""
    async with exchange(port, "/version") as answer:
        told = json.loads(await answer.body())["kv"]
    url = f"tcp://127.0.0.1:{at or told['port']}"
    return {"kv_source": {"url": url, "fingerprint": told["fingerprint"]}}


async def fetched(port: int) -> dict[str, int]:
    """Return the tokens that this server wanted from elsewhere, by what became of them."""
    async with exchange(port, "/metrics") as answer:
        text = (await answer.body()).decode()
    found = re.findall(r'^paceline:kv_fetch_tokens_total{.*result="(\w+)".*} (\S+)', text, re.M)
    return {result: int(float(tokens)) for result, tokens in found}


class Servers:
    """Servers of one part, closed together."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    def __enter__(self) -> Servers:
        os.environ["PACELINE_KV_KEY"] = _KEY
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str, *flags: str) -> PacelineServer:
        """Start one; closing it is a drain."""
        server = PacelineServer(*self._flags, *flags, log=self.folder / f"{name}.log")
        return self._stack.enter_context(closing(server))


def model_flags() -> tuple[str, ...]:
    """Return the flags of a server with the real model."""
    places, _ = our_places()
    # a busy machine may predict that the first token comes late
    return str(places.model), "--served-model-name", "m", "--max-predicted-ttft", "0"


async def restart() -> dict[str, Any]:
    """Compare a prompt computed with the same one after a restart."""
    draw, cold, stored, same = random.Random(0), list[float](), list[float](), True
    with Servers(*model_flags()) as servers:
        for turn in range(ROUNDS):
            store, asked = str(servers.folder / f"store{turn}"), prompt(draw)
            found: list[Made] = []
            for name in ("cold", "store"):
                with closing(servers.start(f"{name}{turn}", "--kv-store", store)) as server:
                    await stream(server.port, prompt(draw, 512), 4)
                    found.append(await stream(server.port, asked, 16))
            cold.append(found[0].ttft)
            stored.append(found[1].ttft)
            same = same and found[0].ids == found[1].ids
    return _compared("ttft_cold", cold, "ttft_store", stored) | {"same": same}


async def hit() -> dict[str, Any]:
    """Compare a prompt computed with one that a peer has computed, over a link with a rate."""
    draw, cold, quick, same = random.Random(1), list[float](), list[float](), True
    with Servers(*model_flags(), "--kv-port", "0") as servers:
        first, second = servers.start("first"), servers.start("second")
        for server in (first, second):
            await stream(server.port, prompt(draw, 512), 4)
        plain = await source_of(first.port)
        peer_port = int(plain["kv_source"]["url"].rpartition(":")[2])
        async with relay(peer_port, MBIT * 1e6 / 8) as at:
            source = await source_of(first.port, at)
            for _ in range(ROUNDS):
                asked = prompt(draw)
                computed = await stream(first.port, asked, 16)
                here = await stream(second.port, asked, 16, **source)
                cold.append((await stream(second.port, prompt(draw), 16)).ttft)
                quick.append(here.ttft)
                same = same and computed.ids == here.ids
            came = await fetched(second.port)
    return _compared("ttft_cold", cold, "ttft_peer", quick) | {
        "same": same,
        "mbit": MBIT,
        "tokens": came,
    }


async def moves() -> dict[str, Any]:
    """Compare gaps of streams that move, and count what random moves lose."""
    draw, same = random.Random(2), True
    gaps: tuple[list[float], list[float]] = [], []
    with Servers(*model_flags(), "--kv-port", "0") as servers:
        first, second = servers.start("first"), servers.start("second")
        for server in (first, second):
            await stream(server.port, prompt(draw, 512), 4)
        source = await source_of(first.port)
        for _ in range(ROUNDS):
            for place, fields in enumerate((source, {})):
                asked = prompt(draw)
                before = await stream(first.port, asked, 24, stop_at=8)
                after = await stream(second.port, asked, 24, resume_output_ids=before.ids, **fields)
                uncut = await stream(first.port, asked, 24)
                gaps[place].append(after.times[0] - before.times[-1])
                same = same and before.ids + after.ids == uncut.ids
    told = _compared("gap_compute", gaps[1], "gap_fetch", gaps[0])
    return told | {"same": same} | await _random_moves()


async def _random_moves() -> dict[str, Any]:
    flags = ("--backend", "null", "--null-step-time", "0.005", "--kv-port", "0")
    lost = doubled = done = 0
    gaps: list[float] = []
    with Servers(*flags) as servers:
        ports = [servers.start(name).port for name in ("first", "second")]
        sources = [await source_of(port) for port in ports]

        async def moved(number: int, count: int) -> None:
            nonlocal lost, doubled, done
            draw = random.Random(number)
            asked, total = prompt(draw, draw.randint(40, 400)), 200
            cuts = sorted(draw.sample(range(1, total), count))
            made: list[int] = []
            at, last = number % 2, 0.0
            for cut in [*cuts, total]:
                if len(made) >= cut:
                    # several tokens came at once
                    continue
                fields = {"resume_output_ids": list(made), **sources[1 - at]} if made else {}
                part = await stream(
                    ports[at], asked, total, stop_at=cut - len(made) if cut < total else None,
                    **fields,
                )  # fmt: skip
                if made:
                    done += 1
                    gaps.append(part.times[0] - last)
                made += part.ids
                last, at = part.times[-1], 1 - at
            right = expected_tokens(asked, total, _NULL_VOCAB)
            lost += max(0, total - len(made))
            doubled += max(0, len(made) - total)
            lost += sum(a != b for a, b in zip(made, right, strict=False))

        number = 0
        while done < MOVES:
            each = max(1, min(20, -(-(MOVES - done) // _STREAMS)))
            group = range(number, number + _STREAMS)
            await asyncio.gather(*(moved(n, each) for n in group))
            number += _STREAMS
    return {
        "count": done, "lost": lost, "doubled": doubled,
        "gap_p99_ms": round(1e3 * percentile(gaps, 0.99), 1),
    }  # fmt: skip


@asynccontextmanager
async def relay(port: int, bytes_per_s: float) -> AsyncIterator[int]:
    """Pass connections on to ``port`` at a rate in each direction, and yield the port for them."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        free = time.monotonic()
        while data := await reader.read(1 << 18):
            free = max(free, time.monotonic()) + len(data) / bytes_per_s
            await asyncio.sleep(max(0.0, free - time.monotonic()))
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        await asyncio.gather(
            copy(reader, other_writer), copy(other_reader, writer), return_exceptions=True
        )

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield int(server.sockets[0].getsockname()[1])


def _compared(
    slow: str, slow_s: Sequence[float], quick: str, quick_s: Sequence[float]
) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(slow_s, quick_s, strict=True)]
    return {
        slow: round(median(slow_s), 4), quick: round(median(quick_s), 4),
        "ratio": round(median(ratios), 4),
    }  # fmt: skip


PARTS: Final[dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]]] = {
    "restart": restart, "hit": hit, "moves": moves,
}  # fmt: skip
# what a part's figures are called in the bench of the whole fleet
NAMES: Final = {"restart": "restart", "hit": "peer", "moves": "moves"}


def rows(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the results."""
    for part, figures in results.items():
        told = ", ".join(f"{name} {value}" for name, value in figures.items())
        yield f"{part:8} {told}"


def main() -> int:
    """Run the parts that are named, or all; return 0 if nothing was lost or doubled."""
    named = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in named if name not in PARTS]:
        raise SystemExit(f"unknown part {unknown[0]!r}: choose of {', '.join(PARTS)}")
    results = {NAMES[name]: asyncio.run(PARTS[name]()) for name in named}
    print(*rows(results), sep="\n")
    print(json.dumps({"bench": "fleet", "machine": machine(), "results": results}))
    wrong = any(
        not each["same"] or each.get("lost") or each.get("doubled") for each in results.values()
    )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
