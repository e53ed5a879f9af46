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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.common.client import Timing, check_answered, complete, exchange, get
from benchmarks.common.load import FIRST_ID
from benchmarks.common.processes import REPOSITORY, Command, Process, Unavailable, free_port
from benchmarks.common.unmeasured import Unmeasured

__all__ = [
    "Contender", "Load", "Served", "Windows", "Work", "figures", "measure", "requests_at", "served",
]  # fmt: skip

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

    def requests(self, capacity: float, seconds: float, work: Work) -> list[_Request]:
        """Return the arrivals: the same for each contender, and more of them for longer. Other
        loads have other prompts, which no cache holds yet."""
        return requests_at(
            self.multiple * capacity, seconds, work, seed=f"load {self.name}", burst=self.burst
        )


# at which nothing may be lost
BELOW: Final = Load(0.5)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Seconds of each measurement."""

    capacity: float
    # arrivals at each rate, and at the highest one with the core's plan
    rate: float
    sustained: float


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


@contextmanager
def served(peer: Served, contender: Contender, folder: Path) -> Iterator[tuple[int, str]]:
    """Start a server, and give its port and its model's name. Raises Unavailable."""
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
        yield port, model
        if not process.alive:
            raise Unavailable(f"{contender.name} ended under load: {process.tail()}")


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


def _requests(rate: float, work: Work, seed: int | str, burst: int = 1) -> Iterator[_Request]:
    chance, at = random.Random(seed), 0.0
    for number in itertools.count():
        at += chance.expovariate(rate / burst) if number % burst == 0 else 0.0
        long = chance.random() < 0.15
        length = chance.randint(*(work.long if long else work.short))
        prompt = [chance.randrange(FIRST_ID, work.vocabulary) for _ in range(length)]
        yield _Request(at, prompt, chance.randint(*work.outputs))


async def _replay(
    port: int, model: str, requests: Sequence[_Request], work: Work, *, paced: bool
) -> list[Timing]:
    began = time.monotonic()

    def fields(request: _Request) -> dict[str, Any]:
        targets = {"ttft_ms": 1e3 * work.ttft_of(request), "tpot_ms": 1e3 * work.tpot}
        return {"slo": targets} if paced else {}

    async def one(request: _Request) -> Timing:
        await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
        return await complete(
            port, model, request.prompt, request.output, timeout=PATIENCE, fields=fields(request)
        )

    return list(await asyncio.gather(*map(one, requests)))


async def _warm(port: int, model: str, work: Work) -> None:
    """Answer a few requests together: the first ones compile, however long that takes."""
    plan = requests_at(1_000.0, 1.0, work, seed=5)[:8]
    check_answered(
        await asyncio.gather(
            *(complete(port, model, each.prompt, each.output, timeout=300.0) for each in plan)
        )
    )


async def _saturate(port: int, model: str, work: Work, seconds: float) -> float:
    """Return the requests a second that a server completes with many outstanding. On a slow or busy
    machine it takes up to four times the seconds."""
    pool = _requests(1_000.0, work, seed=7)
    began = time.monotonic()
    ends: list[float] = []

    def enough() -> bool:
        least = seconds if len(ends) >= 2 * work.outstanding else 4.0 * seconds
        return time.monotonic() - began > least

    async def client() -> None:
        for request in pool:
            if enough():
                return
            timing = await complete(port, model, request.prompt, request.output, timeout=120.0)
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


def measure(
    peer: Served, work: Work, folder: Path, loads: Sequence[Load], windows: Windows,
    failed: Unmeasured, found: dict[str, Any],
) -> None:  # fmt: skip
    """Fill ``found`` with the figures of the live part, and print them as they come. A server that
    fails ends its own figures alone; without the first one there is no capacity. The last load is
    the one that is sustained."""
    rates: dict[str, dict[str, Any]] = {}
    found["rates"] = rates
    plain, paced = Contender("plain"), Contender("paced", PACED, paced=True)
    answers: list[list[int]] = []
    plans: dict[str, list[_Request]] = {}
    # the same with the target in seconds
    strict = work

    def window(server: tuple[int, str], contender: Contender, name: str) -> dict[str, Any]:
        return _run(*server, plans[name], contender, work, name, windows.rate)

    def saturated(server: tuple[int, str], name: str) -> float:
        capacity = asyncio.run(_saturate(*server, work, windows.capacity))
        _say(f"capacity of {name}, without targets: {capacity:.2f} requests a second")
        found.setdefault("capacity_per_s", {})[name] = round(capacity, 3)
        return capacity

    with failed.part("plain"), served(peer, plain, folder) as server:
        asyncio.run(_warm(*server, work))
        answers += asyncio.run(_greedy(*server, work, together=False))
        alone = asyncio.run(_alone(*server, work))
        work = replace(work, tpot=work.scale * alone)
        found["tpot_s"] = {"alone": round(alone, 4), "target": round(work.tpot, 4)}
        _say(f"alone a token takes {alone:.3f} s; the target is {work.tpot:.3f} s")
        capacity = saturated(server, "plain")
        for load in (*loads, BELOW):
            plan = plans[load.name] = load.requests(capacity, windows.rate, work)
            rates[load.name] = {"possible": round(min(1.0, 1.0 / load.multiple), 3)}
            timings = asyncio.run(_replay(*server, plan, work, paced=False))
            for key, each in (("plain", work), (f"plain, {strict.tpot:g} s", strict)):
                rates[load.name][key] = figures(plan, timings, each, windows.rate)
                _say(f"  {load.name:>4} x capacity, {key:14} {rates[load.name][key]}")
    if not plans:
        return
    with failed.part("paced"), served(peer, paced, folder) as server:
        asyncio.run(_warm(*server, work))
        found["identical_greedy"] = {
            "alone": _same(answers, asyncio.run(_greedy(*server, work, together=False))),
            "together": _same(answers, asyncio.run(_greedy(*server, work, together=True))),
        }
        saturated(server, "paced")
        highest = loads[-1]
        for name in (name for name in plans if name != highest.name):
            rates[name]["paced"] = window(server, paced, name)
            rates[name][f"paced, {strict.tpot:g} s"] = _run(
                *server, plans[name], paced, strict, name, windows.rate
            )
        # the same arrivals, and then more of them
        longer = highest.requests(capacity, windows.sustained, work)
        timings = asyncio.run(_replay(*server, longer, work, paced=True))
        plan = plans[highest.name]
        first = rates[highest.name]["paced"] = figures(
            plan, timings[: len(plan)], work, windows.rate
        )
        _say(f"  {highest.name:>4} x capacity, {paced.name:14} {first}")
        found["sustained"] = {"load": highest.name, "seconds": windows.sustained}
        found["sustained"] |= figures(longer, timings, work, windows.sustained)
        _say(f"  {highest.name:>4} x capacity, sustained      {found['sustained']}")
        found["steps_live"] = asyncio.run(_steps(server[0]))
    for tokens, seqs in work.tuned:
        flags = ("--max-num-batched-tokens", str(tokens), "--max-num-seqs", str(seqs))
        tried = Contender(f"tuned-{tokens}-{seqs}", flags)
        with failed.part(tried.name), served(peer, tried, folder) as server:
            asyncio.run(_warm(*server, work))
            for load in loads:
                best = rates[load.name].get("tuned", {"kept": -1.0})
                one = window(server, tried, load.name) | {"flags": " ".join(flags)}
                rates[load.name]["tuned"] = max(best, one, key=lambda each: each["kept"])
    found["below_capacity"] = rates.pop(BELOW.name)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(
    port: int, model: str, plan: Sequence[_Request], contender: Contender, work: Work, name: str,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    timings = asyncio.run(_replay(port, model, plan, work, paced=contender.paced))
    found = figures(plan, timings, work, seconds)
    _say(f"  {name:>4} x capacity, {contender.name:14} {found}")
    return found


async def _alone(port: int, model: str, work: Work) -> float:
    """Return the median seconds between tokens of requests that are asked one after another."""
    plan = requests_at(1_000.0, 1.0, work, seed=11)[:ALONE]
    timings = [await complete(port, model, each.prompt, each.output, timeout=60.0) for each in plan]
    check_answered(timings)
    return statistics.median(timing.tpot or 0.0 for timing in timings)


async def _greedy(port: int, model: str, work: Work, *, together: bool) -> list[list[int]]:
    """Return the tokens of greedy answers to a few prompts, one after another or all at once."""
    plan = requests_at(1_000.0, 1.0, work, seed=9)[:GREEDY]

    async def one(prompt: list[int]) -> list[int]:
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        body |= {"return_token_ids": True}
        async with asyncio.timeout(300.0), exchange(port, "/v1/completions", body) as answer:
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
