"""Gaps in streams when a long prompt arrives, and the cost of a bound on them to the prompts.

Method: a live server on the default model. Eight callers each stream an answer with a target of
60 ms a token, and prompts of 2,000 random tokens arrive one after another, EVERY seconds apart, the
first right after the server's start. The same with steps bounded (``--max-token-gap-ms``, the
default) and not (0), in turns A B A B, each turn on a server of its own, so that the first large
prompt after start is in every turn. A gap is the time between two events of a stream by the
client's clock; the client shares the processors with the server. Cost: the prompts' mean time to
first token, and the prompt tokens per second that follow from it.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Sequence

from benchmarks.common.client import Timing, check_answered, complete
from benchmarks.common.ours import Ours
from benchmarks.common.processes import free_port
from benchmarks.common.server import Server
from benchmarks.common.setup import Places
from benchmarks.common.statistics import percentile
from benchmarks.common.unmeasured import Unmeasured

QUICK = bool(os.environ.get("QUICK"))
TURNS = 1 if QUICK else 3
PROMPTS = 4 if QUICK else 8
STREAMS = 8
TOKENS = 2000
# seconds between prompts
EVERY = 4.0
PACE_MS = 60
PATIENCE = 180.0
BOUNDS: dict[str, tuple[str, ...]] = {"bounded": (), "unbounded": ("--max-token-gap-ms", "0")}


def play(server: Server, vocab_size: int, seed: int) -> tuple[list[Timing], list[Timing]]:
    """Return timings of (streams, prompts). The streams last until the last prompt is done."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, vocab_size) for _ in range(count)]

    async def one(prompt: list[int], output: int, slo: dict[str, float]) -> Timing:
        return await complete(
            server.port, server.model, prompt, output, timeout=PATIENCE, fields={"slo": slo}
        )

    async def stream(until: asyncio.Event) -> list[Timing]:
        found = []
        while not until.is_set():
            found.append(await one(tokens(32), 200, {"tpot_ms": PACE_MS}))
        return found

    async def everything() -> tuple[list[Timing], list[Timing]]:
        over = asyncio.Event()
        streams = [asyncio.create_task(stream(over)) for _ in range(STREAMS)]
        prompts = []
        for _ in range(PROMPTS):
            await asyncio.sleep(EVERY)
            prompts.append(asyncio.create_task(one(tokens(TOKENS), 2, {})))
        answered = await asyncio.gather(*prompts)
        over.set()
        return [t for found in await asyncio.gather(*streams) for t in found], list(answered)

    return asyncio.run(everything())


def figures(streams: Sequence[Timing], prompts: Sequence[Timing]) -> dict[str, float]:
    """Return ms and tokens a second. Raises Unavailable for requests that failed."""
    check_answered((*streams, *prompts))
    gaps = [gap for timing in streams for gap in timing.gaps]
    tpots = [timing.tpot for timing in streams if timing.tpot is not None]
    ttft = statistics.mean(timing.ttft for timing in prompts)
    return {
        "gaps": len(gaps),
        "gap_p50_ms": round(1e3 * percentile(gaps, 0.5), 1),
        "gap_p99_ms": round(1e3 * percentile(gaps, 0.99), 1),
        "gap_p999_ms": round(1e3 * percentile(gaps, 0.999), 1),
        "gap_max_ms": round(1e3 * max(gaps), 1),
        "tpot_p99_ms": round(1e3 * percentile(tpots, 0.99), 1),
        "prompt_ttft_mean_ms": round(1e3 * ttft, 1),
        "prompt_tokens_per_s": round(TOKENS / ttft, 1),
    }


def measure(places: Places, vocab: int, unmeasured: Unmeasured) -> dict[str, dict[str, float]]:
    """Return the figures by bound, and print them."""
    found: dict[str, tuple[list[Timing], list[Timing]]] = {name: ([], []) for name in BOUNDS}
    for turn in range(TURNS):
        for name, flags in BOUNDS.items():
            peer = Ours(name, places, flags)
            log = places.folder("logs") / f"gaps-{name}.log"
            with unmeasured.part(f"{name}, turn {turn + 1}"):
                with Server(peer, free_port(), log, vocab) as server:
                    streams, prompts = play(server, vocab, turn)
                print(f"turn {turn + 1} {name:10} {figures(streams, prompts)}", flush=True)
                found[name][0].extend(streams)
                found[name][1].extend(prompts)
    results = {name: figures(*timings) for name, timings in found.items() if timings[0]}
    for name, row in results.items():
        print(f"{name:10} {row}", flush=True)
    return results
