"""Faults of a fleet on this host, each under streams whose tokens are known: ``make test-fleet``.

    python -m benchmarks.fleet.faults

FAULTS (1) is how often each happens, STREAMS (32) how many streams there are at once. The counts go
to ``build/fleet-faults.json``, which ``make bench NAME=fleet`` reads. Exit code 1 where a stream
failed, lost a token or had one twice. With Ray in this environment its processes are killed too;
without, that is said. The gap of a stream is the longest time between two of its parts, so other
work on the processors adds to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet.live import Fleet, Streams, running_fleet

__all__ = ["FOUND", "RAY_FAULTS", "actors", "faults"]

FOUND: Final = Path("build/fleet-faults.json")
# parts of the command lines of Ray's processes
_OF_RAY: Final = (b"/ray/core/src/", b"/ray/_private/", b"/ray/dashboard/")
_STEP: Final = 0.05
_TOKENS: Final = 80
# parts of all streams before a fault, and behind what it led to
_PARTS: Final = 400

Fault = Callable[[Fleet], Awaitable[None]]


def _end(fleet: Fleet, *, engine: bool, how: signal.Signals) -> str:
    record = fleet.records()[0]
    if engine:
        os.kill(fleet.engine_of(record), how)
    else:
        os.killpg(record.pid, how)
    return record.name


async def _replica_killed(fleet: Fleet) -> None:
    await fleet.settled([_end(fleet, engine=False, how=signal.SIGKILL)])


async def _replica_stopped(fleet: Fleet) -> None:
    # killed after its lease
    await fleet.settled([_end(fleet, engine=False, how=signal.SIGSTOP)])


async def _engine_killed(fleet: Fleet) -> None:
    await fleet.settled([_end(fleet, engine=True, how=signal.SIGKILL)])


async def _engine_stopped(fleet: Fleet) -> None:
    await fleet.settled([_end(fleet, engine=True, how=signal.SIGSTOP)])


async def _controller_killed(fleet: Fleet) -> None:
    fleet.kill_controller()
    name = _end(fleet, engine=False, how=signal.SIGKILL)
    fleet.start_controller()
    await fleet.settled([name])


async def _update(fleet: Fleet) -> None:
    before = {each.name for each in fleet.records()}
    fleet.change("--max-num-seqs", str(100 + len(fleet.serve)))
    await fleet.settled([*before])


def actors() -> set[int]:
    """Return the processes of a fleet's actors on this host."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::EngineHost"):
                found.add(int(path.parent.name))
    return found


async def _actor_killed(fleet: Fleet) -> None:
    before = actors()
    os.kill(min(before), signal.SIGKILL)
    await fleet.until(lambda status: bool(actors() - before))


FAULTS: Final[dict[str, Fault]] = {
    "replica killed": _replica_killed,
    "replica stopped": _replica_stopped,
    "engine killed": _engine_killed,
    "engine stopped": _engine_stopped,
    "controller and replica killed": _controller_killed,
    "update": _update,
}
RAY_FAULTS: Final[dict[str, Fault]] = {
    "replica killed, Ray": _replica_killed,
    "actor killed": _actor_killed,
    "update, Ray": _update,
}


def ray_mb() -> float:
    """Return the memory of all of Ray's processes on this host, shared pages divided, in MB."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, StopIteration):
            command = path.read_bytes()
            if command.startswith(b"ray::") or any(part in command for part in _OF_RAY):
                lines = (path.parent / "smaps_rollup").read_text().splitlines()
                total += int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return round(total / 1024.0, 1)


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    """A head and two nodes on this host; yields its address."""
    from ray.cluster_utils import Cluster

    memory = 80 << 20
    head = {"num_cpus": 0, "object_store_memory": memory, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, object_store_memory=memory)
        yield cluster.address
    finally:
        cluster.shutdown()


async def _under_streams(fleet: Fleet, fault: Fault, streams: int) -> Streams:
    async with Streams(fleet, streams, tokens=_TOKENS).running() as found:
        await found.parts(_PARTS)
        await fault(fleet)
        await found.parts(_PARTS)
    return found


def faults(times: int, streams: int, chosen: dict[str, Fault], fleet_lines: str = "") -> Any:
    """Return each fault's counts; every one happens ``times`` to a fleet of three."""
    rows: dict[str, Any] = {}
    serve = ("--backend", "null", "--null-step-time", str(_STEP))
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(
            Path(folder), serve=serve, fleet_lines=fleet_lines,
            pool_lines="lease = 5\n" + ("resources = {CPU = 1}\n" if fleet_lines else ""),
        ) as fleet,
    ):  # fmt: skip
        asyncio.run(fleet.settled())
        for name, fault in chosen.items():
            runs = []
            for _ in range(times):
                found = asyncio.run(_under_streams(fleet, fault, streams))
                runs.append(found.counts())
                for error in found.errors():
                    print(f"  {name}: {error}", file=sys.stderr)
            rows[name] = {
                "runs": times,
                **{key: sum(run[key] for run in runs) for key in _SUMS},
                "gap_p99_s": round(max(run["gap_p99_s"] for run in runs), 3),
            }
            print(f"  {name}: {rows[name]}", file=sys.stderr, flush=True)
    return rows


_SUMS: Final = ("streams", "failed", "lost", "doubled")


def main() -> int:
    """Run all faults and write their counts; return 1 where a stream was hurt."""
    times, streams = int(os.environ.get("FAULTS", "1")), int(os.environ.get("STREAMS", "32"))
    only = os.environ.get("ONLY", "")
    rows = faults(times, streams, {n: f for n, f in FAULTS.items() if only in n})
    missing, idle_mb = {}, None
    if importlib.util.find_spec("ray") is None:
        missing["ray"] = 'Ray is not in this environment: pip install "paceline[ray]"'
        print(f"  faults of Ray: {missing['ray']}", file=sys.stderr)
    else:
        with ray_cluster() as address:
            chosen = {n: f for n, f in RAY_FAULTS.items() if only in n}
            rows |= faults(times, streams, chosen, f'ray = "{address}"')
            idle_mb = ray_mb()
    told: dict[str, Any] = {"runs": sum(row["runs"] for row in rows.values())}
    told |= {key: sum(row[key] for row in rows.values()) for key in _SUMS}
    told["gap_p99_s"] = max((row["gap_p99_s"] for row in rows.values()), default=None)
    FOUND.parent.mkdir(exist_ok=True)
    FOUND.write_text(json.dumps({**told, "rows": rows, "idle_mb": idle_mb, "unmeasured": missing}))
    print(json.dumps(told))
    return int(bool(told["failed"] or told["lost"] or told["doubled"]))


if __name__ == "__main__":
    sys.exit(main())
