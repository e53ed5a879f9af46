"""The live server that the simulator has to predict, and its clients: the "own" part of ``sim``."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.client import complete
from benchmarks.common.server import PacelineServer
from paceline.sim.arrival import Arrival

__all__ = ["Load", "Seen", "make_load", "measure", "serving"]

MODEL = "smollm2-135m"
# seconds for a whole answer, after which the run fails
_PATIENCE = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals with lognormal lengths, cut to a range."""

    rate: float
    seconds: float
    # median, sigma, least, most
    prompt: tuple[float, float, int, int]
    output: tuple[float, float, int, int]
    seed: int


@dataclass(frozen=True, slots=True)
class Seen:
    """Times of one request at its caller; seconds of ``time.monotonic()``."""

    arrival: Arrival
    sent: float
    first: float
    last: float


def make_load(load: Load) -> list[Arrival]:
    """Return the requests of a load, in order."""
    rng = random.Random(load.seed)

    def length(shape: tuple[float, float, int, int]) -> int:
        median, sigma, least, most = shape
        return min(most, max(least, round(median * rng.lognormvariate(0.0, sigma))))

    arrivals: list[Arrival] = []
    at = 0.0
    while True:
        at += rng.expovariate(load.rate)
        if at > load.seconds:
            return arrivals
        arrivals.append(Arrival(at, length(load.prompt), length(load.output)))


@contextlib.contextmanager
def serving(record: Path) -> Iterator[int]:
    """Run ``paceline serve`` with its defaults, prefix caching off (prompts share nothing), and
    record. Yields the port; drained at the end, so that the recording is complete."""
    flags = ("--record", str(record), "--no-enable-prefix-caching", "--log-level", "warning")
    with PacelineServer(MODEL, *flags, log=record.with_suffix(".log")) as server:
        yield server.port
        server.close(grace=60.0)


def measure(port: int, arrivals: Sequence[Arrival], text: Sequence[int]) -> list[Seen]:
    """Send every request at its time, open loop; ``text`` is a long token sequence that prompts
    are cut from. Raises RuntimeError if any request fails."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        start = rng.randrange(len(text) - length)
        return list(text[start : start + length])

    prompts = [prompt(arrival.prompt_tokens) for arrival in arrivals]

    async def ask(arrival: Arrival, tokens: list[int]) -> Seen:
        found = await complete(port, MODEL, tokens, arrival.output_tokens, timeout=_PATIENCE)
        if found.error:
            raise RuntimeError(found.error)
        return Seen(arrival, found.sent, found.events[0], found.events[-1])

    async def run() -> list[Seen]:
        # leaves out the work that a server does only once
        for length in (8, 64, 256, 512):
            await ask(Arrival(0.0, length, 8), prompt(length))
        begin = time.monotonic() + 0.5

        async def one(arrival: Arrival, tokens: list[int]) -> Seen:
            await asyncio.sleep(max(0.0, begin + arrival.at - time.monotonic()))
            return await ask(arrival, tokens)

        pairs = zip(arrivals, prompts, strict=True)
        return await asyncio.gather(*(one(arrival, tokens) for arrival, tokens in pairs))

    return asyncio.run(run())
