"""Prompts and answers apart: one replica for each against two that do both, a core each.

    python -m benchmarks.fleet.apart

Method. SmolLM2-135M, prompts of ``PROMPT`` (512) random tokens, ``OUTPUT`` (64) tokens of
output, arrivals at random. What the simulator is told is measured first, at other requests than
those that are judged: step times of a replica on one core while another one computes on the other
core, as they share caches and memory, without drafts; and the time from the first token at the
replica for prompts to the next one at that for answers, through the gateway.

For each target the simulator finds, with the gateway's own decision, the highest rate of either way
at which 90 % of the requests are within both limits. The targets are multiples of what was
measured: 5 prompts for the first token, and for a token 15 steps of one sequence (loose), or that
of 1.5, 2, 3 and 4 steps (tight) at which the ways differ most in the simulation, at all of
``SEEDS``. The live rate is the geometric mean of the two: the simulated winner meets it and the
loser does not. Then both ways run live behind a gateway, ``PD_REQUESTS`` (60) requests at each
target, the same at the same times: each replica's processes may use one core, which they share with
the gateway and this client.

``ratio`` is requests within both targets, apart over together: ``simulated`` at that rate, the mean
and at each seed, and ``live``. ``difference`` is that of the live shares with its interval of 95 %,
by pairs of the same request. ``same_sign``: both ratios are above 1, or both are not; ``certain``:
no seed and no end of the interval says otherwise. ``handed`` counts live hand-overs.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Final

from benchmarks.common.client import Timing, complete, exchange
from benchmarks.common.processes import Unavailable
from benchmarks.common.server import PacelineServer, ReadyServer
from benchmarks.fleet.blocks import model_flags, prompt
from paceline.bench.machine import machine
from paceline.sim.plan.apart import ApartLoad, best_ways, pool_of, run_way
from paceline.sim.plan.split import decode_step, prompt_step
from paceline.sim.pool import Pool
from paceline.sim.step_times.spec import Source, open_step_times
from paceline.sim.transfer import KVTransfer

__all__ = ["apart"]

PROMPT: Final = int(os.environ.get("PROMPT", "512"))
OUTPUT: Final = int(os.environ.get("OUTPUT", "64"))
REQUESTS: Final = int(os.environ.get("PD_REQUESTS", "60"))
SEEDS: Final = (3, 13, 23, 33)
# targets of a token, in steps of one sequence, and of the first one, in prompts
TARGETS: Final = {"tight": (1.5, 2.0, 3.0, 4.0), "loose": (15.0,)}
_TTFT: Final = 5.0
# streams that are handed over to measure what that takes
_HAND_OVERS: Final = 9
_SPLIT_ABOVE: Final = 256
_KEY: Final = "benchmark-key-012345"
# seconds in which a request must be answered
_PATIENCE: Final = 600.0


def _met(found: Timing, ttft: float, tpot: float) -> bool:
    return not found.error and found.ttft <= ttft and (found.tpot or 0.0) <= tpot


async def _one(
    port: int, tokens: list[int], ttft: float, tpot: float, count: int = OUTPUT
) -> Timing:
    slo = {"ttft_ms": 1e3 * ttft, "tpot_ms": 1e3 * tpot}
    return await complete(port, "m", tokens, count, timeout=_PATIENCE, fields={"slo": slo})


async def _load(port: int, rate: float, ttft: float, tpot: float, seed: int) -> list[Timing]:
    """Send ``REQUESTS`` at random."""
    draw = random.Random(seed)
    tasks: list[asyncio.Task[Timing]] = []
    began, due = time.monotonic(), 0.0
    for _ in range(REQUESTS):
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        tasks.append(asyncio.create_task(_one(port, prompt(draw, PROMPT), ttft, tpot)))
    return await asyncio.gather(*tasks)


def _told(found: list[Timing], ttft: float, tpot: float) -> dict[str, Any]:
    errors = [each.error for each in found if each.error]
    good = [each for each in found if not each.error]
    seconds = {
        "ttft": [each.ttft for each in good], "tpot": [each.tpot or 0.0 for each in good],
        # from the first token to the next
        "gap": [each.gaps[0] for each in good],
    }  # fmt: skip
    return {
        "requests": len(found), "met": sum(_met(each, ttft, tpot) for each in found),
        **{f"{name}_p50": round(median(each), 4) if each else None
           for name, each in seconds.items()},
        **{f"late_{name}": sum(each > limit for each in seconds[name])
           for name, limit in (("ttft", ttft), ("tpot", tpot))},
        "errors": len(errors), **({"error": errors[0]} if errors else {}),
    }  # fmt: skip


def _paired(
    both: tuple[list[Timing], list[Timing]], limits: tuple[float, float]
) -> tuple[float, float]:
    """Return the interval of 95 % of the difference of shares, the second minus the first."""
    pairs = zip(*both, strict=True)
    each = [float(_met(b, *limits)) - float(_met(a, *limits)) for a, b in pairs]
    half = 1.96 * stdev(each) / len(each) ** 0.5
    return fmean(each) - half, fmean(each) + half


def _server(folder: Path, name: str, core: int, *flags: str) -> PacelineServer:
    return PacelineServer(
        *model_flags(),
        "--speculative-config",
        '{"method": "off"}',
        *flags,
        log=folder / f"{name}.log",
        around=("taskset", "-c", str(core)),
    )


def _record(folder: Path, cores: list[int]) -> Source:
    """Record two replicas under the same mixed load at once, and return the step times of one."""
    files = [folder / f"recording{number}.jsonl" for number in range(2)]
    with ExitStack() as stack:
        ports = []
        for number, file in enumerate(files):
            server = _server(folder, f"recorded{number}", cores[number], "--record", str(file))
            ports.append(stack.enter_context(closing(server)).port)

        async def drive() -> None:
            draw = random.Random(7)
            for number in (0, 0, 0, 1, 1, 2, 2, 3):
                waves = [
                    _one(port, prompt(draw, PROMPT), 60.0, 1.0)
                    for _ in range(2**number)
                    for port in ports
                ]
                await asyncio.gather(*waves)

        asyncio.run(drive())
    return open_step_times(f"recorded:{files[0]}", seed=1)


async def _hand_over_gap(port: int) -> float:
    """Return the seconds that a hand-over adds between two tokens: each prompt comes while an
    answer is made, which is why it is handed over."""
    draw = random.Random(17)
    added = []
    for _ in range(_HAND_OVERS):
        running = asyncio.create_task(_one(port, prompt(draw, 16), 60.0, 1.0, count=8 * OUTPUT))
        await asyncio.sleep(0.5)
        found = await _one(port, prompt(draw, PROMPT), 60.0, 1.0)
        await running
        if found.error:
            raise Unavailable(f"a hand-over failed: {found.error}")
        # a step of the answer is there without one too
        gap, *others = found.gaps
        added.append(gap - sum(others) / (OUTPUT - 2))
    return max(0.0, median(added))


@contextmanager
def _gateway(folder: Path, *roles: str) -> Iterator[int]:
    """Run replicas of these roles, a core each, behind a gateway, and yield its port."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["PACELINE_KV_KEY"] = _KEY
    with ExitStack() as stack:
        lines = [f'spend_storage = ""\nsplit_above = {_SPLIT_ABOVE}\n']
        for number, role in enumerate(roles):
            server = _server(folder, f"{role}{number}", cores[number], "--kv-port", "0")
            stack.enter_context(closing(server))
            lines.append(
                f'[[engines]]\nname = "e{number}"\nkind = "paceline"\nrole = "{role}"\n'
                f'url = "http://127.0.0.1:{server.port}"\n'
            )
        config = folder / "gateway.toml"
        config.write_text("\n".join(lines))
        argv = (sys.executable, "-m", "paceline.cli.main", "gateway", str(config), "--port", "0")
        ready = r"^paceline gateway ready: http://\S+:(\d+)/v1"
        gateway = ReadyServer(argv, ready, folder / "gateway.log", seconds=60.0)
        stack.enter_context(closing(gateway))
        # it asks the engines what they can do
        time.sleep(2.0)
        yield gateway.port


async def _handed(port: int) -> dict[str, int]:
    async with exchange(port, "/metrics") as answer:
        text = (await answer.body()).decode()
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("paceline:gateway_handed_total{"):
            result = line.partition('result="')[2].partition('"')[0]
            counts[result] = counts.get(result, 0) + round(float(line.split()[-1]))
    return counts


def _seconds(source: Source) -> tuple[float, float]:
    """Return the recorded seconds of a step of one sequence, and of a prompt alone."""
    assert source.config is not None, "it is recorded"
    times = source.another(0).times
    chunk = min(PROMPT, source.config.scheduler.max_num_batched_tokens)
    whole = times.seconds(prompt_step(0, chunk)) * PROMPT / chunk
    return times.seconds(decode_step(1, PROMPT + OUTPUT // 2)), whole


def _try(
    make: Callable[[int, int], Pool], ttft: float, tpot: float, guess: float
) -> dict[str, Any]:
    """Return the rate to try, and the ratio at each seed."""
    loads = [ApartLoad(PROMPT, OUTPUT, ttft, tpot, seed=seed) for seed in SEEDS]
    together, split = best_ways(make, loads[0], 2, guess=guess)
    low = 0.05 * guess
    rate = (max(low, together.rate) * max(low, split.rate)) ** 0.5
    shares = [
        [run_way(make(w.prompts, w.outputs), load, rate).attainment for w in (together, split)]
        for load in loads
    ]
    return {
        "ttft": round(ttft, 4), "tpot": round(tpot, 5), "rate": round(rate, 3),
        "rates": {"together": round(together.rate, 3), "apart": round(split.rate, 3)},
        "shares": [[round(share, 3) for share in pair] for pair in shares],
        "ratios": [round(pair[1] / max(1e-3, pair[0]), 2) for pair in shares],
    }  # fmt: skip


def _simulated(source: Source, latency: float) -> dict[str, dict[str, Any]]:
    """Return for each target the rate to try, and how many requests are within it both ways."""
    recorded = source.config
    assert recorded is not None, "it is recorded"
    config = replace(recorded, cache=replace(recorded.cache, enable_prefix_caching=True))
    step, whole = _seconds(source)
    # all prompts have one length
    transfer = KVTransfer(0.0, 1.0, latency, between_steps=True)

    def make(prompts: int, outputs: int) -> Pool:
        return pool_of(
            config, lambda n: source.another(n).times, prompts, outputs, transfer, _SPLIT_ABOVE
        )

    told: dict[str, dict[str, Any]] = {}
    for name, factors in TARGETS.items():
        tried = []
        for factor in factors:
            found = _try(make, _TTFT * whole, factor * step, 1.0 / whole)
            tried.append({"steps": factor, **found})
            print(f"  pd {name}: simulated {tried[-1]}", file=sys.stderr, flush=True)
        # where the least sure of all seeds is surest
        told[name] = max(tried, key=lambda each: _sureness(each["ratios"]))
    return told


def _sureness(ratios: Sequence[float]) -> float:
    logs = [math.log(max(0.01, ratio)) for ratio in ratios]
    return max(min(logs), -max(logs))


def apart() -> dict[str, Any]:
    """Return both ratios of both targets; raises Unavailable where there are not two cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise Unavailable("one prefill and one decode replica need a core each")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = _record(folder, cores)
        with _gateway(folder, "prompts", "outputs") as port:
            asyncio.run(_warm(port))
            latency = asyncio.run(_hand_over_gap(port))
            results["measured"] = dict(
                zip(("step_s", "prompt_s"), _seconds(source), strict=True), hand_over_s=latency,
                handed=asyncio.run(_handed(port)),
            )  # fmt: skip
            print(f"  pd: {results['measured']}", file=sys.stderr, flush=True)
        simulated = _simulated(source, latency)
        live: dict[str, dict[str, list[Timing]]] = {each: {} for each in TARGETS}
        for way, roles in (("together", ("both", "both")), ("apart", ("prompts", "outputs"))):
            with _gateway(folder, *roles) as port:
                # the gateway and the replicas learn what steps and prompts take
                asyncio.run(_warm(port))
                for target in TARGETS:
                    ttft, tpot, rate = (simulated[target][k] for k in ("ttft", "tpot", "rate"))
                    found = live[target][way] = asyncio.run(_load(port, rate, ttft, tpot, seed=5))
                    told = _told(found, ttft, tpot)
                    print(f"  pd {target} {way}: {told}", file=sys.stderr, flush=True)
                results["handed"] = asyncio.run(_handed(port))
    for target, each in simulated.items():
        results[target] = _compared(each, live[target])
    return results


def _compared(simulated: dict[str, Any], live: dict[str, list[Timing]]) -> dict[str, Any]:
    limits: tuple[float, float] = simulated["ttft"], simulated["tpot"]
    both = live["together"], live["apart"]
    together, split = (sum(_met(each, *limits) for each in way) for way in both)
    low, high = _paired(both, limits)
    ratios = {
        "simulated": round(fmean(simulated["ratios"]), 2),
        "live": round(split / max(1, together), 2),
    }
    said = {ratio > 1.0 for ratio in (*simulated["ratios"], ratios["live"])}
    return {
        "ratio": ratios,
        "difference": [round(low, 3), round(high, 3)],
        "same_sign": len({ratio > 1.0 for ratio in ratios.values()}) == 1,
        "certain": len(said) == 1 and low * high > 0.0,
        "simulated": simulated,
        "live": {way: _told(found, *limits) for way, found in live.items()},
    }


async def _warm(port: int) -> None:
    draw = random.Random(11)
    for _ in range(3):
        await asyncio.gather(*(_one(port, prompt(draw, PROMPT), 5.0, 0.1) for _ in range(4)))


def main() -> int:
    """Run the part alone; return 1 if a request failed."""
    results = apart()
    print(json.dumps({"bench": "fleet", "machine": machine(), "results": {"pd": results}}))
    return int(any(each["errors"] for t in TARGETS for each in results[t]["live"].values()))


if __name__ == "__main__":
    sys.exit(main())
