"""Policies to choose an engine, live: the gateway's compared with others, before the default model
in int8, q4 and bfloat16.

Three servers of one thread each, pinned to the cores there are, one after the other: on a machine
of two cores the first and the third share one, as the line of engines shows. Every policy sends
through the same gateway: the gateway's own by a model that all three serve, others by a model for
each engine, which the caller chooses by the policy. So the way is equally long for all, and polls
are a quarter of a second apart, as they are by default.

Loads are those of the simulator's part (mixed, and long prefixes that many share), smaller; their
rate is ``SHARE`` of the three engines' joint capacity, measured before, at the same time, in closed
loops: requests that ended within the time, by the time, which on a slow machine is until each
engine has ended a request. A load is left out if a request fails there. Arrivals, prompts and
lengths of a turn are the same for all policies, but for a mark of fixed width at the beginning of
each prompt, so that no policy finds another one's prefixes in the caches. Policies take turns, in
an order that moves on by one, as many turns as policies, so that each goes first once.

All policies keep what they learned from turn to turn, and all begin with the results of the closed
loops: the gateway relayed those requests, the others get the same ones to learn from. The gateway
also sees requests of other policies' turns, and its prediction of an engine learns from them. The
guard of prefix affinity is set for the load: three mean prompts more than elsewhere are too many.

Targets are set from times measured in the closed loops. Goodput is the share of requests that meet
both of theirs. Ratios are of sums over turns, with the 95 % interval of a bootstrap over pairs of
turns; with four turns it is coarse. A ratio to a policy whose requests all missed their targets is
null, and ``undefined`` names the load.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.common.client import Timing, complete
from benchmarks.common.processes import Unavailable
from benchmarks.common.server import PacelineServer, ReadyServer
from benchmarks.common.statistics import percentile, ratio_of_sums
from benchmarks.common.unmeasured import Unmeasured
from paceline.routing import LeastOutstanding, PrefixAffinity, RoundRobin, Router

__all__ = [
    "DTYPES",
    "POLICIES",
    "TURNS",
    "Asked",
    "Chooser",
    "Outstanding",
    "headline",
    "live_routing",
    "mark",
    "plan",
    "ratios",
]

DTYPES: Final = ("int8", "q4", "bfloat16")
SHARE: Final = 0.7
OURS: Final = "gateway"
POLICIES: Final = (OURS, "round-robin", "least-outstanding", "prefix-affinity")
LOADS: Final = ("mixed", "shared")
# as many as policies, so that each goes first equally often
TURNS: Final = len(POLICIES)
# callers of each engine in a closed loop, as many as make it busy
_CALLERS: Final = 4
_PIECE: Final = 256
_PREFIX_PIECES: Final = 4
_PREFIXES: Final = 8
_TIMEOUT: Final = 60.0
# targets of callers that read along, and of others, as factors on (TTFT, TPOT) of busy engines
_TIGHT: Final = (0.5, 1.0)
_WIDE: Final = (2.0, 1.6)
# least seconds of a closed loop, as a request takes a good part of a second
_LEAST_SECONDS: Final = 6.0
_BYTES_PER_TOKEN: Final = 4
# mean prompts that an engine may have more than the least loaded one before prefix affinity leaves
# it: the default suits engines for hundreds of requests, these serve a dozen
_SPREAD_PROMPTS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a plan."""

    # seconds from the turn's beginning
    at: float
    text: str
    output: int
    # whether its caller reads along
    tight: bool

    @property
    def pieces(self) -> tuple[int, ...]:
        """Return the hashes of the prompt's pieces, by which policies know it."""
        whole = range(0, len(self.text) - _PIECE + 1, _PIECE)
        return tuple(hash(self.text[start : start + _PIECE]) for start in whole)


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets in seconds: to the first token, and for each token after it."""

    tight: tuple[float, float]
    wide: tuple[float, float]

    def of(self, asked: Asked) -> tuple[float, float]:
        return self.tight if asked.tight else self.wide


@dataclass(slots=True)
class Outstanding:
    """Load of the engines that policies see: tokens of unfinished requests, with outputs of the
    average length so far."""

    tokens: list[float] = field(default_factory=lambda: [0.0] * len(DTYPES))
    num_ended: int = 0
    made: int = 0

    def add(self, index: int, asked: Asked) -> float:
        mean = self.made / self.num_ended if self.num_ended else 16.0
        # whole tokens, so that idle engines have exactly 0 outstanding in every turn
        amount = float(round(len(asked.text) / _BYTES_PER_TOKEN + mean))
        self.tokens[index] += amount
        return amount

    def end(self, index: int, amount: float, output: int) -> None:
        self.tokens[index] -= amount
        self.num_ended += 1
        self.made += output


class Chooser:
    """A policy outside the gateway and its knowledge, kept for all turns of a load."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._outstanding = Outstanding()

    def begin(self, asked: Asked) -> tuple[int, float]:
        """Choose an engine; return its index, and the amount to pass to ``end``."""
        index = self._router.choose(asked.pieces, self._outstanding.tokens)
        return index, self._outstanding.add(index, asked)

    def end(self, index: int, amount: float, output: int) -> None:
        self._outstanding.end(index, amount, output)

    def learn(self, index: int, asked: Asked, output: int) -> None:
        """Learn from a request that went to the engine ``index`` by its name and ended there."""
        # the engine is the only one that is not full, so the router remembers the prompt there
        full = [0.0 if other == index else float("inf") for other in range(len(DTYPES))]
        self._router.choose(asked.pieces, full)
        self.end(index, self._outstanding.add(index, asked), output)


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of the closed loops."""

    # requests a second of each engine that ended within the time
    rates: Mapping[str, float]
    targets: Targets
    # all requests in the order in which they ended: engine, request, tokens generated
    ended: Sequence[tuple[int, Asked, int]]

    @property
    def mean_prompt_tokens(self) -> float:
        return statistics.fmean(len(asked.text) for _, asked, _ in self.ended) / _BYTES_PER_TOKEN


def mark(who: int, turn: int) -> str:
    """Return the beginning of all prompts of one turn of one policy, or of one engine's closed
    loops; equally wide for all, so that prompts are equally long."""
    if not (0 <= who < 100 and 0 <= turn < 1000):
        raise ValueError(f"a mark has two digits and three, got {who} and {turn}")
    return f"{who:02d}-{turn:03d}"


def plan(load: str, rate: float, seconds: float, seed: int, begins: str) -> list[Asked]:
    """Return the requests of one turn; each prompt begins with ``begins`` (see ``mark``), which
    makes it unique to the turn."""
    rng = random.Random(f"{load} {seed}")
    found: list[Asked] = []
    at = rng.expovariate(rate)
    while at < seconds or not found:
        if load == "mixed":
            text = _words(rng, max(64, min(2400, round(rng.lognormvariate(6.2, 0.6)))))
        else:
            which = rng.randrange(2) if rng.random() < 0.5 else rng.randrange(_PREFIXES)
            prefix = _words(random.Random(f"prefix {which}"), _PIECE * _PREFIX_PIECES)
            text = prefix + _words(rng, rng.randrange(60, 300))
        output = max(4, min(48, round(rng.lognormvariate(2.9, 0.5))))
        found.append(Asked(at, f"{begins} {text}", output, rng.random() < 0.5))
        at += rng.expovariate(rate)
    return found


def _words(rng: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += "".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 8))) + " "
    return text[:length]


def live_routing(
    seconds: float, turns: int, log_dir: Path, unmeasured: Unmeasured
) -> dict[str, Any]:
    """Return goodput of each policy by load, and ratios of the gateway's. ``unmeasured`` gets the
    loads that these engines cannot serve.

    Args:
        seconds: length of the arrivals in one turn.
        turns: number for each policy; a multiple of ``TURNS``, or else some go first more often.
    """
    with ExitStack() as stack:
        cores = _cores()
        engines = [
            stack.enter_context(_engine(name, core, log_dir))
            for name, core in zip(DTYPES, cores, strict=True)
        ]
        ports = [engine.port for engine in engines]
        gateway = stack.enter_context(_gateway(ports, log_dir))
        rows: dict[str, Any] = {}
        for load in LOADS:
            with unmeasured.part(f"live routing, {load}"):
                rows[load] = asyncio.run(_load(gateway.port, load, seconds, turns))
                print(f"  live, {load}: {rows[load]}", file=sys.stderr, flush=True)
    if not rows:
        raise Unavailable(f"none of the loads {', '.join(LOADS)} was measured")
    return {
        "engines": dict(zip(DTYPES, cores, strict=True)),
        "share": SHARE,
        "turns": turns,
        "seconds": seconds,
        **headline(rows),
        "rows": rows,
    }


def ratios(goodput: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return ratios of the gateway's goodput over turns to round robin's and to the best other
    policy's; null if the other policy had none in any turn."""
    means = {name: statistics.fmean(values) for name, values in goodput.items()}
    best = max((name for name in goodput if name != OURS), key=means.__getitem__)
    told: dict[str, Any] = {"best_other": best}
    for name, other in (("vs_round_robin", "round-robin"), ("vs_best_other", best)):
        found = ratio_of_sums(goodput[OURS], goodput[other])
        told[name] = (
            {"ratio": None, "low": None, "high": None}
            if found is None
            else {key: round(value, 3) for key, value in found._asdict().items()}
        )
    return told


def headline(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst load's ratio of each kind, with its interval; loads without one are named.

    Args:
        rows: results of ``ratios`` by load.
    """
    told: dict[str, Any] = {}
    for name in ("vs_round_robin", "vs_best_other"):
        known = {load: row[name] for load, row in rows.items() if row[name]["ratio"] is not None}
        undefined = [load for load in rows if load not in known]
        if known:
            worst = min(known, key=lambda load: known[load]["ratio"])
            told[name] = {**known[worst], "load": worst, "undefined": undefined}
        else:
            nothing = dict.fromkeys(("ratio", "low", "high", "load"))
            told[name] = {**nothing, "undefined": undefined}
    return told


def _cores() -> list[int]:
    """Return a core for each engine; with fewer cores, some share one."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[number % len(cores)] for number in range(len(DTYPES))]


def _engine(dtype: str, core: int, log_dir: Path) -> PacelineServer:
    flags = (
        "--dtype", dtype, "--threads", "1", "--max-num-seqs", "16", "--max-model-len", "2048",
        "--kv-cache-memory", "128MiB", "--log-level", "warning",
    )  # fmt: skip
    around = ("taskset", "-c", str(core))
    return PacelineServer(*flags, log=log_dir / f"live-{dtype}.log", around=around)


def _gateway(ports: Sequence[int], log_dir: Path) -> ReadyServer:
    lines = []
    for name, port in zip(DTYPES, ports, strict=True):
        lines.append(f'[[engines]]\nname = "{name}"\nurl = "http://127.0.0.1:{port}"\n')
    lines.append(f'[[models]]\nname = "{OURS}"\ntiers = [{json.dumps(DTYPES)}]\n')
    for name in DTYPES:
        lines.append(f'[[models]]\nname = "{name}"\ntiers = [["{name}"]]\n')
    config = log_dir / "live.toml"
    config.write_text("\n".join(lines))
    argv = (
        sys.executable, "-m", "paceline.cli.main", "gateway", str(config), "--port", "0",
        "--log-level", "error",
    )  # fmt: skip
    ready = r"^paceline gateway ready: \S+:(\d+)/v1 "
    return ReadyServer(argv, ready, log_dir / "live-gateway.log", seconds=30)


async def _load(port: int, load: str, seconds: float, turns: int) -> dict[str, Any]:
    measured = await _measure(port, load, max(_LEAST_SECONDS, 2.0 * seconds))
    rate = SHARE * sum(measured.rates.values())
    choosers = {name: _chooser(name, measured) for name in POLICIES}
    goodput: dict[str, list[float]] = {name: [] for name in POLICIES}
    failed = requests = 0
    for turn in range(turns):
        first = turn % len(POLICIES)
        for name in (*POLICIES[first:], *POLICIES[:first]):
            asked = plan(load, rate, seconds, turn, mark(POLICIES.index(name), turn))
            timings = await _turn(port, asked, choosers[name], measured.targets)
            good = [
                _is_good(timing, measured.targets.of(each))
                for timing, each in zip(timings, asked, strict=True)
            ]
            goodput[name].append(sum(good) / len(good))
            failed += sum(bool(timing.error) for timing in timings)
            requests += len(timings)
    return {
        "goodput": {n: round(statistics.fmean(v), 3) for n, v in goodput.items()},
        **ratios(goodput),
        "by_turn": {name: [round(v, 3) for v in values] for name, values in goodput.items()},
        "requests": requests,
        "failed": failed,
        "rate": round(rate, 2),
        "rates": {name: round(value, 2) for name, value in measured.rates.items()},
        "targets_s": {
            name: [round(value, 3) for value in getattr(measured.targets, name)]
            for name in ("tight", "wide")
        },
    }


async def _measure(port: int, load: str, seconds: float) -> Measured:
    """Measure the engines while all are busy; no request begins after ``seconds``, or on a slow
    machine after one has ended at each engine. The gateway's prediction learns from these requests
    first. Raises Unavailable if a request fails."""
    found: dict[str, list[Timing]] = {name: [] for name in DTYPES}
    ends: dict[str, list[float]] = {name: [] for name in DTYPES}
    ended: list[tuple[int, Asked, int]] = []
    plans = [
        (index, _endless(load, 1000 + number, len(POLICIES) + index))
        for index in range(len(DTYPES))
        for number in range(_CALLERS)
    ]
    began = time.monotonic()

    async def call(index: int, asked: Iterator[Asked]) -> None:
        name = DTYPES[index]
        for each in asked:
            if time.monotonic() - began > seconds and all(found.values()):
                return
            timing = await _send(port, name, each, {})
            if timing.error:
                raise Unavailable(f"a request at {name} failed: {timing.error}")
            found[name].append(timing)
            ends[name].append(time.monotonic() - began)
            ended.append((index, each, timing.output_tokens))

    await asyncio.gather(*itertools.starmap(call, plans))
    seconds = max(seconds, *(times[0] for times in ends.values()))
    everybodys = [timing for timings in found.values() for timing in timings]
    ttft = percentile([timing.ttft for timing in everybodys], 0.5)
    tpot = percentile([t.tpot for t in everybodys if t.tpot is not None], 0.5)
    targets = Targets((_TIGHT[0] * ttft, _TIGHT[1] * tpot), (_WIDE[0] * ttft, _WIDE[1] * tpot))
    rates = {name: sum(end <= seconds for end in times) / seconds for name, times in ends.items()}
    return Measured(rates, targets, ended)


def _endless(load: str, seed: int, who: int) -> Iterator[Asked]:
    """Yield a plan repeatedly, each time with another mark, so that no prompt is in a cache."""
    # made now, since its time must not count for an engine
    first = plan(load, 1.0, 60.0, seed, mark(who, 0))
    laps = (plan(load, 1.0, 60.0, seed, mark(who, lap)) for lap in itertools.count(1))
    return itertools.chain(first, itertools.chain.from_iterable(laps))


async def _turn(
    port: int, asked: Sequence[Asked], chooser: Chooser | None, targets: Targets
) -> Sequence[Timing]:
    """Send all requests of a plan when they are due, and wait until all have ended. Without
    ``chooser`` the gateway chooses."""
    began = time.monotonic()

    async def one(each: Asked) -> Timing:
        ttft, tpot = targets.of(each)
        slo = {"ttft_ms": 1000.0 * ttft, "tpot_ms": 1000.0 * tpot}
        await asyncio.sleep(max(0.0, began + each.at - time.monotonic()))
        if chooser is None:
            return await _send(port, OURS, each, slo)
        index, amount = chooser.begin(each)
        timing = await _send(port, DTYPES[index], each, slo)
        chooser.end(index, amount, timing.output_tokens)
        return timing

    return await asyncio.gather(*map(one, asked))


def _chooser(policy: str, measured: Measured) -> Chooser | None:
    """Return a policy that has learned from ``measured``. None: the gateway chooses itself."""
    router: Router
    match policy:
        case "round-robin":
            router = RoundRobin()
        case "least-outstanding":
            router = LeastOutstanding()
        case "prefix-affinity":
            router = PrefixAffinity(spread=_SPREAD_PROMPTS * measured.mean_prompt_tokens)
        case _:
            assert policy == OURS, policy
            return None
    chooser = Chooser(router)
    for index, asked, output in measured.ended:
        chooser.learn(index, asked, output)
    return chooser


async def _send(port: int, model: str, asked: Asked, slo: Mapping[str, float]) -> Timing:
    fields: dict[str, Any] = {"prompt": asked.text}
    if slo:
        fields["slo"] = slo
    return await complete(port, model, [], asked.output, timeout=_TIMEOUT, fields=fields)


def _is_good(timing: Timing, targets: tuple[float, float]) -> bool:
    ttft, tpot = targets
    if timing.error or not timing.events:
        return False
    return timing.ttft <= ttft and (timing.tpot is None or timing.tpot <= tpot)
