"""A live vLLM: as it is, tuned, and with the core's plan, under the same arrivals."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from benchmarks.common.client import Timing, check_answered, complete, exchange, get
from benchmarks.common.load import FIRST_ID
from benchmarks.common.processes import REPOSITORY, Command, Process, Unavailable, free_port
from benchmarks.common.unmeasured import Unmeasured

__all__ = [
    "Contender", "Load", "Served", "Server", "Windows", "Work", "figures", "measure", "other_words",
    "requests_at", "served",
]  # fmt: skip

_T = TypeVar("_T")

# most seconds from arrival to the last token; what takes longer is given up by its caller
PATIENCE: Final = 30.0
# prompts whose greedy answers are compared
GREEDY: Final = 6
# requests that are asked one after another, for the time of a token
ALONE: Final = 8
PACED: Final = (
    "--scheduler-cls", "paceline.vllm.PacedScheduler", "--middleware", "paceline.vllm.Admission",
    "--additional-config", '{"paceline": {"policy": "deadline"}}',
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests, their targets, and what is tried; 15 % of the prompts are long."""

    vocabulary: int
    short: tuple[int, int] = (32, 256)
    long: tuple[int, int] = (600, 1_200)
    outputs: tuple[int, int] = (16, 64)
    # seconds to the first token of a short and of a long prompt
    ttft: tuple[float, float] = (2.0, 2.0)
    # between tokens: seconds that a machine may be too slow for, and a multiple of what a request
    # takes that has vLLM to itself, which is the target otherwise
    tpot: float = 0.1
    scale: float = 5.0
    # requests at once while the capacity is measured
    outstanding: int = 32
    # flags that are tried for the tuned contender: tokens a step, requests at once
    tuned: tuple[tuple[int, int], ...] = ((256, 16), (256, 64))

    def ttft_of(self, request: _Request) -> float:
        """Return the target of a request for its first token."""
        return self.ttft[len(request.prompt) >= self.long[0]]


@dataclass(frozen=True)
class Load:
    """Arrivals at a multiple of the measured capacity."""

    multiple: float
    burst: int = 1

    @property
    def name(self) -> str:
        """Return its name in figures."""
        return f"{self.multiple:g}" + (f" in bursts of {self.burst}" if self.burst > 1 else "")

    def requests(
        self, capacity: float, seconds: float, work: Work, turn: str = ""
    ) -> list[_Request]:
        """Return the arrivals: the same for each contender, and more of them for longer. Other
        loads and turns have other prompts, which no cache holds yet."""
        return requests_at(
            self.multiple * capacity, seconds, work, seed=f"load {self.name}{turn}",
            burst=self.burst,
        )  # fmt: skip


# at which nothing may be lost
BELOW: Final = Load(0.5)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Seconds of each measurement."""

    capacity: float
    # arrivals at each rate, and at the highest one with the core's plan
    rate: float
    sustained: float
    # times that each contender has each rate, every second time in the opposite order
    turns: int = 1


class Served(Protocol):
    """An engine whose server can be started; a ``setup.Peer`` is one."""

    def server(self, port: int) -> Command: ...


@dataclass(frozen=True)
class Contender:
    """A way to start vLLM's server."""

    name: str
    flags: tuple[str, ...] = ()
    # whether the flags name this package, which is not installed where vLLM is
    paced: bool = False


class Server(NamedTuple):
    """A running server of a contender."""

    contender: Contender
    port: int
    model: str
    process: Process

    def check(self) -> None:
        """Raise Unavailable if it ended."""
        if not self.process.alive:
            raise Unavailable(f"{self.contender.name} ended under load: {self.process.tail()}")

    def measured(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run what asks it, and freeze it again: an idle vLLM spins, which costs the others."""
        self.process.thaw()
        try:
            found = asyncio.run(work)
            self.check()
            return found
        finally:
            self.process.freeze()


@contextmanager
def served(peer: Served, contender: Contender, folder: Path) -> Iterator[Server]:
    """Start a server, and wait until it lists its model. Raises Unavailable."""
    port = free_port()
    command = peer.server(port)
    command = replace(command, argv=(*command.argv, *contender.flags))
    if contender.paced:
        command = replace(command, env=(*command.env, ("PYTHONPATH", str(REPOSITORY))))
    with Process(command, folder / f"{contender.name}.log") as process:
        deadline = time.monotonic() + command.start_seconds
        while time.monotonic() < deadline:
            if not process.alive:
                raise Unavailable(f"{contender.name} ended: {process.tail()}")
            status, body = asyncio.run(get(port, "/v1/models"))
            if status == 200:
                model: str = json.loads(body)["data"][0]["id"]
                break
            time.sleep(0.5)
        else:
            raise Unavailable(f"{contender.name} did not start: {process.tail()}")
        yield Server(contender, port, model, process)


@dataclass(frozen=True)
class _Request:
    at: float
    prompt: list[int]
    output: int


def requests_at(
    rate: float, seconds: float, work: Work, seed: int | str, *, burst: int = 1
) -> list[_Request]:
    """Return Poisson arrivals, ``burst`` requests at each."""
    requests = _requests(rate, work, seed, burst)
    return list(itertools.takewhile(lambda request: request.at < seconds, requests))


def other_words(plan: Sequence[_Request], work: Work, seed: int | str) -> list[_Request]:
    """Return the same arrivals and lengths with other prompts, which a server that had the first
    ones must compute."""
    chance = random.Random(f"words {seed}")
    return [
        replace(each, prompt=chance.choices(range(FIRST_ID, work.vocabulary), k=len(each.prompt)))
        for each in plan
    ]


def _requests(rate: float, work: Work, seed: int | str, burst: int = 1) -> Iterator[_Request]:
    chance, at = random.Random(seed), 0.0
    for number in itertools.count():
        at += chance.expovariate(rate / burst) if number % burst == 0 else 0.0
        long = chance.random() < 0.15
        length = chance.randint(*(work.long if long else work.short))
        prompt = [chance.randrange(FIRST_ID, work.vocabulary) for _ in range(length)]
        yield _Request(at, prompt, chance.randint(*work.outputs))


async def _replay(server: Server, requests: Sequence[_Request], work: Work) -> list[Timing]:
    began = time.monotonic()

    def fields(request: _Request) -> dict[str, Any]:
        targets = {"ttft_ms": 1e3 * work.ttft_of(request), "tpot_ms": 1e3 * work.tpot}
        return {"slo": targets} if server.contender.paced else {}

    async def one(request: _Request) -> Timing:
        await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
        return await complete(
            server.port, server.model, request.prompt, request.output, timeout=PATIENCE,
            fields=fields(request),
        )  # fmt: skip

    return list(await asyncio.gather(*map(one, requests)))


async def _warm(server: Server, work: Work) -> None:
    """Answer a few requests together: the first ones compile, however long that takes."""
    plan = requests_at(1_000.0, 1.0, work, seed=5)[:8]
    check_answered(
        await asyncio.gather(
            *(
                complete(server.port, server.model, each.prompt, each.output, timeout=300.0)
                for each in plan
            )
        )
    )


async def _saturate(server: Server, work: Work, seconds: float, seed: str) -> float:
    """Return the requests a second that a server completes with many outstanding. On a slow or busy
    machine it takes up to four times the seconds."""
    pool = _requests(1_000.0, work, seed)
    began = time.monotonic()
    ends: list[float] = []

    def enough() -> bool:
        least = seconds if len(ends) >= 2 * work.outstanding else 4.0 * seconds
        return time.monotonic() - began > least

    async def client() -> None:
        for request in pool:
            if enough():
                return
            timing = await complete(
                server.port, server.model, request.prompt, request.output, timeout=120.0
            )
            if not timing.error:
                ends.append(timing.events[-1] - began)

    await asyncio.gather(*(client() for _ in range(work.outstanding)))
    # the first requests start together, and the last ones end with less company
    whole = sorted(ends)[-work.outstanding] if len(ends) > work.outstanding else 0.0
    steady = [end for end in ends if whole / 4 <= end <= whole]
    if len(steady) < 2:
        raise Unavailable(f"{len(ends)} requests were completed in {4.0 * seconds:g} s")
    return len(steady) / (whole - whole / 4)


def figures(
    plan: Sequence[_Request], timings: Sequence[Timing], work: Work, seconds: float
) -> dict[str, Any]:
    """Return the share of a plan's requests that kept both targets, and other figures."""
    done = [timing for timing in timings if not timing.error]
    judged = [
        (
            not t.error and t.ttft <= work.ttft_of(request),
            not t.error and (t.tpot or 0.0) <= work.tpot,
        )
        for request, t in zip(plan, timings, strict=True)
    ]

    def share(values: Iterable[bool]) -> float:
        return round(sum(values) / max(1, len(timings)), 3)

    return {
        "kept": share(first and paced for first, paced in judged),
        "kept_ttft": share(first for first, _ in judged),
        "kept_tpot": share(paced for _, paced in judged),
        "requests": len(timings),
        "complete": len(done),
        "ttft_p50_s": round(statistics.median(t.ttft for t in done), 3) if done else None,
        "tpot_p50_ms": round(1e3 * statistics.median(t.tpot or 0.0 for t in done), 1)
        if done
        else None,
        "tokens_per_s": round(sum(t.output_tokens for t in done) / seconds, 1),
    }


@dataclass
class _Pool:
    """Answers of one contender at one load, in all turns."""

    requests: list[_Request] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    # share kept in each turn, by target
    turns: dict[float, list[float]] = field(default_factory=dict)

    def add(self, plan: Sequence[_Request], timings: Sequence[Timing]) -> None:
        self.requests += plan
        self.timings += timings


class _Live:
    """The servers of one run, next to one another, and what came of them."""

    def __init__(self, work: Work, windows: Windows, failed: Unmeasured) -> None:
        # the same requests with the target of a token in seconds
        self.work, self.strict = work, work
        self.windows, self.failed = windows, failed
        self.servers: dict[str, Server] = {}
        # by load, then by contender
        self.pools: dict[Load, dict[str, _Pool]] = {}
        self.capacities: dict[str, list[float]] = {}

    def start(
        self, stack: ExitStack, peer: Served, folder: Path, contenders: Iterable[Contender]
    ) -> None:
        """Start and warm all servers that can be."""
        for contender in contenders:
            with self.failed.part(contender.name):
                server = stack.enter_context(served(peer, contender, folder))
                server.measured(_warm(server, self.work))
                self.servers[contender.name] = server

    def capacity(self, name: str, when: str) -> float:
        """Measure the requests a second of a server, without targets."""
        server = self.servers[name]
        found = server.measured(
            _saturate(server, self.work, self.windows.capacity, f"capacity {when}")
        )
        self.capacities.setdefault(name, []).append(round(found, 3))
        _say(f"capacity of {name}, without targets: {found:.2f} requests a second")
        return found

    def turn(self, number: int, load: Load) -> None:
        """Run the arrivals of one load on each server, one after another."""
        capacity = self.capacity("plain", f"{number} {load.name}")
        plan = load.requests(capacity, self.windows.rate, self.work, f", turn {number}")
        tries = [(name, self.work) for name in self.servers] + [("paced", self.strict)]
        for name, work in tries if number % 2 == 0 else tries[::-1]:
            if (server := self.servers.get(name)) is None:
                continue
            fixed = name == "paced" and work is self.strict
            asked = other_words(plan, work, f"{load.name} {number}") if fixed else plan
            key = self._named(name) if fixed else name
            pool = self.pools.setdefault(load, {}).setdefault(key, _Pool())
            with self.failed.part(name):
                timings = server.measured(_replay(server, asked, work))
                pool.add(asked, timings)
                once = figures(asked, timings, work, self.windows.rate)
                pool.turns.setdefault(work.tpot, []).append(once["kept"])
                _say(f"  {load.name:>4} x capacity, {key:14} {once}")

    def _named(self, name: str) -> str:
        return f"{name}, {self.strict.tpot:g} s"

    def rate(self, load: Load) -> dict[str, Any]:
        """Return the figures of a load: of all turns together, next to the share of each."""
        found: dict[str, Any] = {"possible": round(min(1.0, 1.0 / load.multiple), 3)}
        for name, pool in self.pools.get(load, {}).items():
            if not pool.timings:
                continue
            contender = self.servers[name.partition(",")[0]].contender
            # the core's plan is judged by the targets that it was given
            judged = [(name, self.strict if name != contender.name else self.work)]
            if not contender.paced:
                judged.append((self._named(name), self.strict))
            for key, work in judged:
                seconds = self.windows.rate * max(map(len, pool.turns.values()))
                one = figures(pool.requests, pool.timings, work, seconds)
                if work.tpot in pool.turns:
                    one["turns"] = pool.turns[work.tpot]
                if key.startswith("tuned"):
                    key = key.replace(contender.name, "tuned")
                    one["flags"] = " ".join(contender.flags)
                    one = max(found.get(key, one), one, key=lambda each: each["kept"])
                found[key] = one
        return found


def measure(
    peer: Served, work: Work, folder: Path, loads: Sequence[Load], windows: Windows,
    failed: Unmeasured, found: dict[str, Any],
) -> None:  # fmt: skip
    """Fill ``found`` with the figures of the live part, and print them as they come. A server that
    fails ends its own figures alone; without the first one there is no capacity. The last load is
    the one that is sustained."""
    plain, paced = Contender("plain"), Contender("paced", PACED, paced=True)
    tuned = [
        Contender(f"tuned-{tokens}-{seqs}",
                  ("--max-num-batched-tokens", str(tokens), "--max-num-seqs", str(seqs)))
        for tokens, seqs in work.tuned
    ]  # fmt: skip
    live = _Live(work, windows, failed)
    found["rates"] = {}
    with ExitStack() as stack:
        live.start(stack, peer, folder, (plain, paced, *tuned))
        if (first := live.servers.get("plain")) is None:
            return
        greedy = first.measured(_greedy(first, work, together=False))
        alone = first.measured(_alone(first, work))
        live.work = work = replace(work, tpot=work.scale * alone)
        found["tpot_s"] = {"alone": round(alone, 4), "target": round(work.tpot, 4)}
        _say(f"alone a token takes {alone:.3f} s; the target is {work.tpot:.3f} s")
        found["capacity_per_s"] = live.capacities
        if (ours := live.servers.get("paced")) is not None:
            with failed.part("paced"):
                found["identical_greedy"] = {
                    name: _same(greedy, ours.measured(_greedy(ours, work, together=together)))
                    for name, together in (("alone", False), ("together", True))
                }
        for number in range(windows.turns):
            if ours is not None:
                with failed.part("paced"):
                    live.capacity("paced", f"{number} paced")
            for load in (*loads, BELOW):
                with failed.part(f"turn {number} of {load.name}"):
                    live.turn(number, load)
        found["rates"] = {load.name: live.rate(load) for load in loads}
        found["below_capacity"] = live.rate(BELOW)
        if ours is not None:
            with failed.part("sustained"):
                found["sustained"] = _sustained(live, ours, loads[-1])
                found["steps_live"] = ours.measured(_steps(ours.port))


def _sustained(live: _Live, server: Server, load: Load) -> dict[str, Any]:
    """Return the figures of the core's plan at a load for longer."""
    capacity = live.capacity("plain", "sustained")
    seconds = live.windows.sustained
    plan = load.requests(capacity, seconds, live.work, ", sustained")
    timings = server.measured(_replay(server, plan, live.work))
    found = {"load": load.name, "seconds": seconds, "possible": round(1.0 / load.multiple, 3)}
    found |= figures(plan, timings, live.work, seconds)
    _say(f"  {load.name:>4} x capacity, sustained      {found}")
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _alone(server: Server, work: Work) -> float:
    """Return the median seconds between tokens of requests that are asked one after another."""
    plan = requests_at(1_000.0, 1.0, work, seed=11)[:ALONE]
    timings = [
        await complete(server.port, server.model, each.prompt, each.output, timeout=60.0)
        for each in plan
    ]
    check_answered(timings)
    return statistics.median(timing.tpot or 0.0 for timing in timings)


async def _greedy(server: Server, work: Work, *, together: bool) -> list[list[int]]:
    """Return the tokens of greedy answers to a few prompts, one after another or all at once."""
    plan = requests_at(1_000.0, 1.0, work, seed=9)[:GREEDY]

    async def one(prompt: list[int]) -> list[int]:
        body = {"model": server.model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        body |= {"return_token_ids": True}
        async with asyncio.timeout(300.0), exchange(server.port, "/v1/completions", body) as answer:
            tokens: list[int] = json.loads(await answer.body())["choices"][0]["token_ids"]
            return tokens

    if together:
        return list(await asyncio.gather(*(one(each.prompt) for each in plan)))
    return [await one(each.prompt) for each in plan]


def _same(expected: Sequence[list[int]], got: Sequence[list[int]]) -> float:
    """Return the share of equal answers."""
    same = sum(one == other for one, other in zip(expected, got, strict=True))
    return round(same / len(expected), 3)


async def _steps(port: int) -> dict[str, float]:
    """Return the share of steps of which vLLM ran something else than planned, and the actual time
    of steps over the predicted one."""
    _, text = await get(port, "/metrics", timeout=30.0)

    def value(name: str, labels: str = "") -> float:
        found = re.search(rf"^paceline:{name}_total\{{.*{labels}\}} (\S+)$", text.decode(), re.M)
        if found is None:
            raise Unavailable(f"/metrics has no paceline:{name}_total")
        return float(found[1])

    predicted = value("step_seconds", 'kind="predicted"')
    return {
        "amended_share": round(value("vllm_amended_steps") / max(1.0, value("steps")), 5),
        "actual_over_predicted": round(
            value("step_seconds", 'kind="actual"') / max(1e-9, predicted), 3
        ),
    }
