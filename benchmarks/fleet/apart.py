"""Prompts and answers apart: one replica for each against two that do both, a core each.

    python -m benchmarks.fleet.apart

Method. SmolLM2-135M, prompts of ``PROMPT`` (512) random tokens, ``OUTPUT`` (64) tokens of
output, arrivals at random. A replica on one core is recorded under a load, without drafts; the
recording's step times drive the simulator, with the gateway's own decision. For each target it
finds the highest rate of either way at which 90 % of the requests are within both limits. The live
rate is the geometric mean of the two: the simulated winner meets it and the loser does not.
The targets are multiples of what the recording says: 2 or 15 steps of one sequence for a token, and
5 prompts for the first one. Then both ways run live behind a gateway, ``PD_SECONDS`` (40) each, at
each target: each replica's processes may use one core, which they share with the gateway and this
client.

``ratio`` is requests within both targets, apart over together: ``simulated`` at that rate, and
``live``. ``same_sign``: both are above 1, or both are not. ``handed`` counts live hand-overs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.common.client import exchange
from benchmarks.common.processes import Unavailable
from benchmarks.common.server import PacelineServer, ReadyServer
from benchmarks.fleet.blocks import model_flags, prompt
from paceline.bench.machine import machine
from paceline.sim.plan.apart import ApartLoad, best_ways, pool_of, run_way
from paceline.sim.plan.split import decode_step, prompt_step
from paceline.sim.simulator import KVTransfer, Pool
from paceline.sim.step_times.spec import Source, open_step_times

__all__ = ["apart"]

PROMPT: Final = int(os.environ.get("PROMPT", "512"))
OUTPUT: Final = int(os.environ.get("OUTPUT", "64"))
SECONDS: Final = float(os.environ.get("PD_SECONDS", "40"))
# targets of a token, in steps of one sequence, and of the first one, in prompts
TARGETS: Final = {"tight": 2.0, "loose": 15.0}
_TTFT: Final = 5.0
# int8 keys and values of the 135M, and a loopback's rate
_KV_BYTES: Final = 12_240.0
_LOOPBACK: Final = 2.5e9
_SPLIT_ABOVE: Final = 256
_KEY: Final = "benchmark-key-012345"


@dataclass
class Outcome:
    """One request as its client saw it."""

    ttft: float = float("inf")
    tpot: float = float("inf")
    error: str = ""


async def _one(port: int, tokens: list[int], ttft: float, tpot: float) -> Outcome:
    body = {
        "model": "m", "prompt": tokens, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True,
        "stream": True, "slo": {"ttft_ms": 1e3 * ttft, "tpot_ms": 1e3 * tpot},
    }  # fmt: skip
    sent = time.monotonic()
    times: list[float] = []
    try:
        async with exchange(port, "/v1/completions", body) as answer:
            if answer.status != 200:
                return Outcome(error=f"status {answer.status}: {(await answer.body())[:200]!r}")
            async for line in answer.lines():
                if line.startswith(b'data: {"error') or b'"error":{' in line:
                    return Outcome(error=line[:200].decode("utf-8", "replace"))
                if line.startswith(b"data: {") and b'"text":' in line:
                    times.append(time.monotonic())
    except OSError as error:
        return Outcome(error=str(error))
    if not times:
        return Outcome(error="no token came")
    return Outcome(times[0] - sent, (times[-1] - times[0]) / (OUTPUT - 1))


async def _load(port: int, rate: float, ttft: float, tpot: float, seed: int) -> dict[str, Any]:
    """Send requests at random for ``SECONDS``; return the share within both targets."""
    draw = random.Random(seed)
    tasks: list[asyncio.Task[Outcome]] = []
    began, due = time.monotonic(), 0.0
    while (due := due + draw.expovariate(rate)) < SECONDS:
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        tasks.append(asyncio.create_task(_one(port, prompt(draw, PROMPT), ttft, tpot)))
    found = await asyncio.gather(*tasks)
    errors = [each.error for each in found if each.error]
    met = sum(each.ttft <= ttft and each.tpot <= tpot for each in found)
    firsts = sorted(each.ttft for each in found if not each.error)
    paces = sorted(each.tpot for each in found if not each.error)
    return {
        "requests": len(found), "met": met, "attainment": round(met / max(1, len(found)), 3),
        "ttft_p50": round(firsts[len(firsts) // 2], 3) if firsts else None,
        "tpot_p50": round(paces[len(paces) // 2], 5) if paces else None,
        "errors": len(errors), **({"error": errors[0]} if errors else {}),
    }  # fmt: skip


def _server(folder: Path, name: str, core: int, *flags: str) -> PacelineServer:
    return PacelineServer(
        *model_flags(),
        "--speculative-config",
        '{"method": "off"}',
        *flags,
        log=folder / f"{name}.log",
        around=("taskset", "-c", str(core)),
    )


def _record(folder: Path, core: int) -> Source:
    """Record a replica on one core under a mixed load, and return its step times."""
    file = folder / "recording.jsonl"
    with closing(_server(folder, "recorded", core, "--record", str(file))) as server:

        async def drive() -> None:
            draw = random.Random(7)
            for number in range(4):
                waves = [
                    _one(server.port, prompt(draw, PROMPT), 60.0, 1.0) for _ in range(2**number)
                ]
                await asyncio.gather(*waves)

        asyncio.run(drive())
    return open_step_times(f"recorded:{file}", seed=1)


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


def _simulated(source: Source) -> dict[str, dict[str, Any]]:
    """Return for each target the rate to try, and how many requests are within it both ways."""
    recorded = source.config
    assert recorded is not None, "it is recorded"
    config = replace(recorded, cache=replace(recorded.cache, enable_prefix_caching=True))
    transfer = KVTransfer(_KV_BYTES, _LOOPBACK, 0.02)

    def make(prompts: int, outputs: int) -> Pool:
        return pool_of(
            config, lambda n: source.another(n).times, prompts, outputs, transfer, _SPLIT_ABOVE
        )

    told: dict[str, dict[str, Any]] = {}
    step, whole = _seconds(source)
    for name, steps in TARGETS.items():
        ttft, tpot = _TTFT * whole, steps * step
        load = ApartLoad(PROMPT, OUTPUT, ttft, tpot, seed=3)
        together, split = best_ways(make, load, 2, guess=1.0 / whole)
        low = 0.05 / whole
        rate = (max(low, together.rate) * max(low, split.rate)) ** 0.5
        shares = {
            way.name: run_way(make(way.prompts, way.outputs), load, rate).attainment
            for way in (together, split)
        }
        told[name] = {
            "rates": {"together": round(together.rate, 2), "apart": round(split.rate, 2)},
            "ttft": round(ttft, 4),
            "tpot": round(tpot, 5),
            "rate": round(rate, 2),
            "attainment": [round(share, 3) for share in shares.values()],
        }
        print(f"  pd {name}: simulated {told[name]}", file=sys.stderr, flush=True)
    return told


def apart() -> dict[str, Any]:
    """Return both ratios of both targets; raises Unavailable where there are not two cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise Unavailable("one prefill and one decode replica need a core each")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        simulated = _simulated(_record(folder, cores[0]))
        live: dict[str, dict[str, dict[str, Any]]] = {each: {} for each in TARGETS}
        for way, roles in (("together", ("both", "both")), ("apart", ("prompts", "outputs"))):
            with _gateway(folder, *roles) as port:
                # the gateway and the replicas learn what steps and prompts take
                asyncio.run(_warm(port))
                for target in TARGETS:
                    ttft, tpot, rate = (simulated[target][k] for k in ("ttft", "tpot", "rate"))
                    found = asyncio.run(_load(port, rate, ttft, tpot, seed=5))
                    live[target][way] = found
                    print(f"  pd {target} {way}: {found}", file=sys.stderr, flush=True)
                results["handed"] = asyncio.run(_handed(port))
    for target in TARGETS:
        together, split = (live[target][way]["met"] for way in ("together", "apart"))
        shares = simulated[target]["attainment"]
        ratios = {
            "simulated": round(shares[1] / max(1e-3, shares[0]), 2),
            "live": round(split / max(1, together), 2),
        }
        signs = {ratio > 1.0 for ratio in ratios.values()}
        results[target] = {
            "ratio": ratios,
            "same_sign": len(signs) == 1, "rate": simulated[target]["rate"],
            "simulated": simulated[target], "live": live[target],
        }  # fmt: skip
    return results


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
