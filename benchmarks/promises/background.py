"""Effect of a large batch in the background on callers who wait for their tokens.

Method: one live server on the default model, and four people who each read an answer as it comes,
think for a while (seeded, exponential) and ask again: prompts of 16 to 96 random ids, 48 tokens of
output. They do the same in turns with nothing else on the server (A) and while it runs a batch of
thousands of lines, posted to ``/v1/batches`` (B): A B A B. In a pair, lengths and pauses are the
same; the tokens of prompts and of lines are new every time, or the second of a pair would find the
first one's in the prefix cache and have less to do. TPOT is a request's mean time per token after
the first, by the client's clock; the figure is the ratio of the 99th percentiles over all of B and
all of A. The same is done with requests without targets; the worse of both counts. The batch's
rate meanwhile is printed next to its rate alone.

The client shares the processors with the server, in A as in B, and has four streams to read; it
does nothing else while they run.

The target is a ratio of 1.2 at most. A round lasts about half a minute; LONG=1 takes one round
instead, A B, of more than five minutes each.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from benchmarks.common.client import Timing, check_answered, complete
from benchmarks.common.ours import Ours
from benchmarks.common.processes import free_port
from benchmarks.common.server import Server
from benchmarks.common.setup import Places
from benchmarks.common.statistics import percentile
from benchmarks.common.unmeasured import Unmeasured

QUICK = bool(os.environ.get("QUICK"))
LONG = bool(os.environ.get("LONG"))
ROUNDS = 1 if LONG else 2 if QUICK else 3
# requests of each person in a round
REQUESTS = 400 if LONG else 12 if QUICK else 25
PEOPLE = 4
OUTPUT = 48
# mean seconds of a pause
THINKING = 0.3
TARGET = 1.2
LINES = 5000
PATIENCE = 120.0
# seconds for the batch to reach its pace, and seconds for which it is then measured alone
_WARM = 3.0
_ALONE = 8.0
CLASSES = ("interactive", "standard")
_BOUNDARY = "background-benchmark"


def ask(server: Server, path: str, body: bytes | None = None, kind: str = "") -> Any:
    """Return the JSON answer to a GET, or to a POST of ``body``."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        body,
        {"Content-Type": kind or "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def batch_lines(count: int, vocab_size: int, seed: int) -> bytes:
    """Return a batch file: prompts of 32 to 256 random ids, 64 tokens of output each."""
    rng = random.Random(seed)
    lines = []
    for number in range(count):
        prompt = [rng.randrange(100, vocab_size) for _ in range(rng.randint(32, 256))]
        body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "temperature": 0}
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line).encode())
    return b"\n".join(lines)


def upload(server: Server, content: bytes) -> str:
    """Upload a batch file, and return its id."""
    head = (
        f"--{_BOUNDARY}\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
        f"--{_BOUNDARY}\r\nContent-Disposition: form-data; name=file; filename=in.jsonl\r\n\r\n"
    )
    body = head.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()
    kind = f"multipart/form-data; boundary={_BOUNDARY}"
    file_id: str = ask(server, "/v1/files", body, kind)["id"]
    return file_id


class Background:
    """A batch that runs until it is ended."""

    def __init__(self, server: Server, vocab_size: int, seed: int) -> None:
        body = {
            "input_file_id": upload(server, batch_lines(LINES, vocab_size, seed)),
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        self._server = server
        self._id = ask(server, "/v1/batches", json.dumps(body).encode())["id"]
        while not self.done():
            time.sleep(0.05)

    def done(self) -> int:
        """Return the lines answered. Raises RuntimeError if the batch is over too early."""
        batch = ask(self._server, f"/v1/batches/{self._id}")
        if batch["status"] not in ("validating", "in_progress"):
            raise RuntimeError(f"the batch is {batch['status']}: {batch['errors']}")
        done: int = batch["request_counts"]["completed"]
        return done

    def end(self) -> None:
        ask(self._server, f"/v1/batches/{self._id}/cancel", b"{}")
        while ask(self._server, f"/v1/batches/{self._id}")["status"] != "cancelled":
            time.sleep(0.05)


def play(server: Server, vocab_size: int, seed: int, slo: str, half: str) -> list[Timing]:
    """Play each person's requests, one after another. Lengths and pauses depend on ``seed`` alone,
    the tokens of prompts on all arguments."""

    async def one(person: int) -> list[Timing]:
        rng = random.Random(f"{seed} {person}")
        tokens = random.Random(f"{seed} {person} {slo} {half}")
        timings = []
        for _ in range(REQUESTS):
            await asyncio.sleep(rng.expovariate(1.0 / THINKING))
            prompt = [tokens.randrange(100, vocab_size) for _ in range(rng.randint(16, 96))]
            timings.append(
                await complete(
                    server.port,
                    server.model,
                    prompt,
                    OUTPUT,
                    timeout=PATIENCE,
                    fields={"slo": slo},
                )
            )
        return timings

    async def everybody() -> list[Timing]:
        found = await asyncio.gather(*(one(person) for person in range(PEOPLE)))
        return [timing for timings in found for timing in timings]

    return asyncio.run(everybody())


def figures(timings: Sequence[Timing]) -> dict[str, float]:
    """Return the figures, in ms. Raises Unavailable for requests that failed."""
    check_answered(timings)
    tpots = [timing.tpot for timing in timings if timing.tpot is not None]
    ttfts = [timing.ttft for timing in timings]
    return {
        "requests": len(timings),
        "tpot_p50_ms": round(1e3 * statistics.median(tpots), 2),
        "tpot_p99_ms": round(1e3 * percentile(tpots, 0.99), 2),
        "ttft_p50_ms": round(1e3 * statistics.median(ttfts), 1),
        "ttft_p99_ms": round(1e3 * percentile(ttfts, 0.99), 1),
    }


def compare(server: Server, vocab: int, slo: str) -> dict[str, Any]:
    """Measure A B A B for one class of requests."""
    alone: list[Timing] = []
    beside: list[Timing] = []
    lines, seconds = 0, 0.0
    for number in range(ROUNDS):
        alone += play(server, vocab, number, slo, "alone")
        batch = Background(server, vocab, 1 + ROUNDS * CLASSES.index(slo) + number)
        time.sleep(_WARM)
        before, began = batch.done(), time.monotonic()
        beside += play(server, vocab, number, slo, "beside")
        lines += batch.done() - before
        seconds += time.monotonic() - began
        batch.end()
    a, b = figures(alone), figures(beside)
    ratio = b["tpot_p99_ms"] / a["tpot_p99_ms"]
    for name, row in (("alone", a), ("beside", b)):
        print(f"{slo:12} {name:7} {row}", flush=True)
    print(f"{slo:12} p99 TPOT {ratio:.2f}x; the batch got {lines / seconds:.2f} lines/s\n")
    return {
        "alone": a,
        "beside": b,
        "tpot_p99_ratio": round(ratio, 3),
        "batch_lines_per_s": round(lines / seconds, 3),
    }


def measure(places: Places, vocab: int, unmeasured: Unmeasured) -> dict[str, Any]:
    """Return the figures by class of requests, and print them."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = Ours("background", places, ("--batch-dir", folder))
        server = Server(peer, free_port(), places.folder("logs") / "background.log", vocab)
        try:
            batch = Background(server, vocab, 0)
            time.sleep(_WARM)
            before = batch.done()
            time.sleep(_ALONE)
            pace = (batch.done() - before) / _ALONE
            batch.end()
            print(f"in {server.served}, the batch alone does {pace:.2f} lines/s\n", flush=True)
            for slo in CLASSES:
                with unmeasured.part(slo):
                    results[slo] = compare(server, vocab, slo)
        finally:
            server.close()
    # None: no class was measured
    ratio = max((result["tpot_p99_ratio"] for result in results.values()), default=None)
    return {
        "tpot_p99_ratio": ratio,
        "within_target": ratio and ratio <= TARGET,
        "batch_alone_lines_per_s": round(pace, 3),
        "formats": server.served,
        **results,
    }
