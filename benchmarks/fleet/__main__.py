"""Fleets: the choice among many engines, moves and updates under streams, the simulated day.

Parts, each of which can be run alone (``PARTS=choice,moves``):

* ``choice``: processor time of a choice among 16, 256 and 1,000 engines; see ``choice``;
* ``moves``: ``MOVES`` (1,000) moves of 32 streams between two replicas of the null backend;
* ``roll``: three rolling updates of three replicas at about 70 % of their slots, with the first
  tokens next to those before them;
* ``restart`` and ``peer``: first tokens of prompts that are read from disk after a restart, and
  fetched from another engine; see ``blocks``;
* ``pd``: one replica for prompts and one for answers against two that do both; see ``apart``;
* ``faults``: the counts that ``make test-fleet`` wrote, and the memory of Ray's head, two nodes and
  three actors, idle;
* ``autoscale``: days of ``HOURS`` (24) by ``SEEDS`` (1,2) in the simulator, which the controller of
  ``paceline fleet`` drives; see ``simulated``;
* ``ray_serve``: a replica killed behind Ray Serve and behind our gateway; see ``ray_serve``;
* ``sim``: an update of 1,000 replicas in the simulator, under 20,000 requests, 50 of them killed.

QUICK=1 takes 64 moves, one update and a small simulation. Prints its findings on standard error as
it goes and, last, one JSON line, in which ``unmeasured`` names what was not measured, and why.

    python -m benchmarks.fleet
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.common.parts import chosen
from benchmarks.common.processes import Unavailable
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.fleet import blocks
from benchmarks.fleet.apart import apart
from benchmarks.fleet.choice import choice_ms
from benchmarks.fleet.faults import FOUND
from benchmarks.fleet.live import KEY, Fleet, Streams, running_fleet
from benchmarks.fleet.ray_serve import compare
from benchmarks.fleet.simulated import autoscale, thousand
from paceline.bench.machine import machine

__all__ = ["main"]

PARTS: Final = (
    "choice", "moves", "roll", "restart", "peer", "pd", "faults", "autoscale", "sim", "ray_serve",
)  # fmt: skip
_STREAMS: Final = 32
_HEADERS: Final = {"Authorization": f"Bearer {KEY}"}
# a slot for each stream and a rest: about 70 % of three replicas with 16 slots
_SLOTS: Final = ("--max-num-seqs", "16")
_ROLL_STEP: Final = 0.05


def _null(step: float, *more: str) -> tuple[str, ...]:
    return ("--backend", "null", "--null-step-time", str(step), *more)


def moves(count: int) -> dict[str, Any]:
    """Return what ``count`` moves of streams do to them. The part owns the pool itself, so the
    controller of the fleet ends first."""

    async def run(fleet: Fleet) -> dict[str, Any]:
        await fleet.settled()
        fleet.kill_controller()
        names = {m["name"]: m["url"] for m in fleet.status()["members"]}
        engines = [{"name": name, "url": url} for name, url in names.items()]
        streams = Streams(fleet, _STREAMS, tokens=400)
        epoch, version, made = time.time_ns() // 1_000_000, 0, 0
        async with httpx.AsyncClient(headers=_HEADERS, timeout=30) as client, streams.running():
            while made < count:
                for name in names:
                    version += 1
                    if version > 4 * count:
                        raise RuntimeError(f"{version} words moved {made} streams")
                    word = {"epoch": epoch, "version": version, "engines": engines, "move": [name]}
                    await client.put(f"{fleet.url}/admin/pools/chat", json=word)
                    await streams.parts(4 * _STREAMS)
                told = (await client.get(f"{fleet.url}/metrics")).text.splitlines()
                rows = [row for row in told if row.startswith("paceline:gateway_moved_total{")]
                made = round(sum(float(row.split()[-1]) for row in rows))
        counts = streams.counts()
        return {
            "count": made,
            "gap_p99_ms": round(1e3 * counts["gap_p99_s"], 1),
            **{key: counts[key] for key in ("streams", "failed", "lost", "doubled")},
        }

    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(Path(folder), replicas=2, serve=_null(0.02)) as fleet,
    ):
        return asyncio.run(run(fleet))


def roll(updates: int) -> dict[str, Any]:
    """Return what rolling updates of three replicas, one after another, do to streams. Callers
    begin one by one, as those that begin at once would wait for each other at any time."""

    async def run(fleet: Fleet) -> dict[str, Any]:
        await fleet.settled()
        streams = Streams(fleet, _STREAMS, tokens=60, spread=60 * _ROLL_STEP)
        seconds = []
        async with streams.running():
            # the gateway learns what the replicas take
            await streams.parts(4000)
            before = time.monotonic()
            await streams.parts(6000 * updates)
            during = time.monotonic()
            for turn in range(updates):
                old = [member["name"] for member in fleet.status()["members"]]
                fleet.change("--max-num-batched-tokens", str(1024 + turn))
                seconds.append(round(await fleet.settled(old), 1))
            after = time.monotonic()
        counts = streams.counts()
        firsts = streams.first_p99(before, during), streams.first_p99(during, after)
        return {
            **{key: counts[key] for key in ("streams", "failed", "lost", "doubled")},
            "updated": sum(during <= each.began < after for _, each in streams.found),
            "seconds": seconds,
            "ttft_p99_s": [round(first, 3) for first in firsts],
            "ttft_p99_ratio": round(firsts[1] / firsts[0], 2),
        }

    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(Path(folder), serve=_null(_ROLL_STEP, *_SLOTS)) as fleet,
    ):
        return asyncio.run(run(fleet))


def _faults() -> Any:
    if not FOUND.exists():
        raise Unavailable(f"{FOUND} is not there: make test-fleet FAULTS=5 writes it")
    return json.loads(FOUND.read_text())


def main() -> int:
    """Measure the chosen parts and print the result; return 1 after an unexpected error."""
    quick = bool(os.environ.get("QUICK"))
    parts = chosen(PARTS)
    num_moves = int(os.environ.get("MOVES", "64" if quick else "1000"))
    hours = float(os.environ.get("HOURS", "0.5" if quick else "24"))
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "0" if quick else "1,2").split(",")]
    size = (50, 500) if quick else (1000, 20_000)
    measures: dict[str, Any] = {
        "choice": lambda: {str(n): round(choice_ms(n), 3) for n in (16, 256, 1000)},
        "moves": lambda: moves(num_moves),
        "roll": lambda: roll(1 if quick else 3),
        "restart": lambda: asyncio.run(blocks.restart()),
        "peer": lambda: asyncio.run(blocks.hit()),
        "pd": apart,
        "faults": _faults,
        "autoscale": lambda: autoscale(hours, seeds),
        "sim": lambda: thousand(*size),
        "ray_serve": compare,
    }
    unmeasured = Unmeasured()
    results: dict[str, Any] = {}
    for part in parts:
        with unmeasured.part(part):
            found = measures[part]()
            print(f"  {part}: {found}", file=sys.stderr, flush=True)
            results["choice_ms" if part == "choice" else part] = found
    if "faults" in results:
        results["idle_mb"] = results["faults"].pop("idle_mb")
        unmeasured.reasons |= results["faults"].pop("unmeasured")
    if "sim" in results:
        results["sim_1000_s"] = results["sim"]["seconds"] if not quick else None
    left_out = {part: "not among PARTS" for part in PARTS if part not in parts}
    told = {**left_out, **unmeasured.reasons}
    print(json.dumps({
        "bench": "fleet", "machine": machine(), "results": results, "unmeasured": told,
    }))  # fmt: skip
    return unmeasured.exit_code


if __name__ == "__main__":
    sys.exit(main())
