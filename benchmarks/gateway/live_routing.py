"""Policies to choose an engine, live: the gateway's beside others, before the default model in
int8, q4 and bfloat16.

Three servers of one thread each, pinned to the cores there are, one after the other: on a machine
of two cores the first and the third share one, which the line of engines says. Every policy sends
through the same gateway: its own by a model that all three serve, others by a model for each
engine, which the caller chooses as the policy says. So the way is equally long for all, and polls
are a quarter of a second apart, as they are by default.

Loads are those of the simulator's part (mixed, and long prefixes that many share), smaller; a load
comes at ``SHARE`` of what the three bear together, measured before, at the same time, in closed
loops. Arrivals, prompts and lengths of one turn are the same for all policies, but for the first
words of each prompt, so that no policy finds what another one left in the caches. Policies come in
turns, in an order that moves on by one. Targets are made from what was measured in the closed
loops. Goodput is the share of requests that meet both of theirs; ratios are of the mean, with the
95 % interval over turns, in pairs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.common.client import Timing, complete
from benchmarks.common.server import PacelineServer, ReadyServer
from benchmarks.common.statistics import paired_ratio, percentile
from paceline.routing import LeastOutstanding, PrefixAffinity, RoundRobin, Router

__all__ = ["DTYPES", "POLICIES", "Asked", "live_routing", "plan", "ratios"]

DTYPES: Final = ("int8", "q4", "bfloat16")
SHARE: Final = 0.7
OURS: Final = "gateway"
POLICIES: Final = (OURS, "round-robin", "least-outstanding", "prefix-affinity")
LOADS: Final = ("mixed", "shared")
# callers of each engine in a closed loop, as many as make it busy
_CALLERS: Final = 4
_PIECE: Final = 256
_PREFIX_PIECES: Final = 4
_PREFIXES: Final = 8
_TIMEOUT: Final = 60.0
# of what was seen at engines as busy as they can be: targets of those who read along, and of others
_TIGHT: Final = (0.5, 1.0)
_WIDE: Final = (2.0, 1.6)
# seconds of a closed loop, at least: a request takes a good part of one
_LEAST_SECONDS: Final = 6.0
# a turn in which nothing was in time counts as about half a request: ratios would have no bounds
_LEAST: Final = 0.02
_BYTES_PER_TOKEN: Final = 4


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
        """As policies see the prompt."""
        whole = range(0, len(self.text) - _PIECE + 1, _PIECE)
        return tuple(hash(self.text[start : start + _PIECE]) for start in whole)


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds to the first token and for each one after it."""

    tight: tuple[float, float]
    wide: tuple[float, float]

    def of(self, asked: Asked) -> tuple[float, float]:
        return self.tight if asked.tight else self.wide


@dataclass(slots=True)
class Outstanding:
    """What policies see of the engines: tokens of unfinished requests, outputs as they were on
    average so far."""

    tokens: list[float] = field(default_factory=lambda: [0.0] * len(DTYPES))
    num_ended: int = 0
    made: int = 0

    def add(self, index: int, asked: Asked) -> float:
        mean = self.made / self.num_ended if self.num_ended else 16.0
        amount = len(asked.text) / _BYTES_PER_TOKEN + mean
        self.tokens[index] += amount
        return amount

    def end(self, index: int, amount: float, output: int) -> None:
        self.tokens[index] -= amount
        self.num_ended += 1
        self.made += output


def plan(load: str, rate: float, seconds: float, seed: int, mark: str) -> list[Asked]:
    """The requests of one turn; ``mark`` begins each prompt, and makes it nobody else's."""
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
        found.append(Asked(at, f"{mark} {text}", output, rng.random() < 0.5))
        at += rng.expovariate(rate)
    return found


def _words(rng: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += "".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 8))) + " "
    return text[:length]


def live_routing(seconds: float, turns: int, log_dir: Path) -> dict[str, Any]:
    """Goodput of each policy by load, and ratios of the gateway's.

    Args:
        seconds: of arrivals in one turn.
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
            rows[load] = asyncio.run(_load(gateway.port, load, seconds, turns))
            print(f"  live, {load}: {rows[load]}", file=sys.stderr, flush=True)
    return {
        "engines": dict(zip(DTYPES, cores, strict=True)),
        "share": SHARE,
        "turns": turns,
        "seconds": seconds,
        "vs_round_robin": min(row["vs_round_robin"]["ratio"] for row in rows.values()),
        "vs_best_other": min(row["vs_best_other"]["ratio"] for row in rows.values()),
        "rows": rows,
    }


def ratios(goodput: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of the gateway's goodput in each turn, to round robin's and to the best other policy's."""
    means = {name: statistics.fmean(values) for name, values in goodput.items()}
    best = max((name for name in goodput if name != OURS), key=means.__getitem__)
    told: dict[str, Any] = {"best_other": best}
    for name, other in (("vs_round_robin", "round-robin"), ("vs_best_other", best)):
        found = paired_ratio(
            [max(_LEAST, value) for value in goodput[OURS]],
            [max(_LEAST, value) for value in goodput[other]],
        )
        told[name] = {
            "ratio": round(max(_LEAST, means[OURS]) / max(_LEAST, means[other]), 3),
            "low": round(found.low, 3),
            "high": round(found.high, 3),
        }
    return told


def _cores() -> list[int]:
    """A core for each engine; where there are fewer, some share one."""
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
    rates, targets = await _measure(port, load, max(_LEAST_SECONDS, 2.0 * seconds))
    rate = SHARE * sum(rates.values())
    goodput: dict[str, list[float]] = {name: [] for name in POLICIES}
    failed = requests = 0
    for turn in range(turns):
        first = turn % len(POLICIES)
        for name in (*POLICIES[first:], *POLICIES[:first]):
            asked = plan(load, rate, seconds, turn, f"{name} {turn}")
            timings = await _turn(port, asked, name, targets)
            good = [
                _is_good(timing, targets.of(each))
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
        "rates": {name: round(value, 2) for name, value in rates.items()},
        "targets_s": {
            name: [round(value, 3) for value in getattr(targets, name)]
            for name in ("tight", "wide")
        },
    }


async def _measure(port: int, load: str, seconds: float) -> tuple[dict[str, float], Targets]:
    """Requests a second of each engine while all are busy, and targets made from their times. What
    the gateway's prediction learns from, it learns here."""
    found: dict[str, list[Timing]] = {name: [] for name in DTYPES}
    began = time.monotonic()

    async def call(name: str, number: int) -> None:
        asked = plan(load, 1.0, 60.0, 1000 + number, f"measured {name}")
        for each in asked:
            if time.monotonic() - began > seconds and found[name]:
                return
            found[name].append(await _send(port, name, each, {}))

    await asyncio.gather(*(call(name, n) for name in DTYPES for n in range(_CALLERS)))
    took = time.monotonic() - began
    for name, timings in found.items():
        if wrong := [timing.error for timing in timings if timing.error]:
            raise RuntimeError(f"{name} failed: {wrong[0]}")
    everybodys = [timing for timings in found.values() for timing in timings]
    ttft = percentile([timing.ttft for timing in everybodys], 0.5)
    tpot = percentile([t.tpot for t in everybodys if t.tpot is not None], 0.5)
    targets = Targets((_TIGHT[0] * ttft, _TIGHT[1] * tpot), (_WIDE[0] * ttft, _WIDE[1] * tpot))
    return {name: len(timings) / took for name, timings in found.items()}, targets


async def _turn(
    port: int, asked: Sequence[Asked], policy: str, targets: Targets
) -> Sequence[Timing]:
    """All of a plan's requests, when they are due; ends when all have ended."""
    router = _router(policy)
    seen = Outstanding()
    began = time.monotonic()

    async def one(each: Asked) -> Timing:
        ttft, tpot = targets.of(each)
        slo = {"ttft_ms": 1000.0 * ttft, "tpot_ms": 1000.0 * tpot}
        await asyncio.sleep(max(0.0, began + each.at - time.monotonic()))
        if router is None:
            return await _send(port, OURS, each, slo)
        index = router.choose(each.pieces, seen.tokens)
        amount = seen.add(index, each)
        timing = await _send(port, DTYPES[index], each, slo)
        seen.end(index, amount, timing.output_tokens)
        return timing

    return await asyncio.gather(*map(one, asked))


def _router(policy: str) -> Router | None:
    """None: the gateway chooses itself."""
    match policy:
        case "round-robin":
            return RoundRobin()
        case "least-outstanding":
            return LeastOutstanding()
        case "prefix-affinity":
            return PrefixAffinity()
    assert policy == OURS, policy
    return None


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
