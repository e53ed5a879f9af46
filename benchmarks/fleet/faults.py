"""Faults of a fleet on this host, each under streams whose tokens are known: ``make test-fleet``.

    python -m benchmarks.fleet.faults

FAULTS (1) is how often each happens, STREAMS (32) how many streams there are at once, ONLY a part
of the names of those that shall happen. The counts go to ``build/fleet-faults.json``, which
``make bench NAME=fleet`` reads; with ONLY they replace the same faults' there. Exit code 1 where a
stream failed, lost a token or had one twice. With Ray in this environment its processes are killed
too, and where namespaces can be made, links go down and disks are full (``isolated``); otherwise
that is said. The gap of a stream is the longest time between two of its parts, so other
work on the processors adds to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.common.processes import Unavailable
from benchmarks.fleet import isolated
from benchmarks.fleet.live import Fleet, Streams, running_fleet

__all__ = ["FOUND", "RAY_FAULTS", "actors", "faults"]

FOUND: Final = Path("build/fleet-faults.json")
# parts of the command lines of Ray's processes
_OF_RAY: Final = (b"/ray/core/src/", b"/ray/_private/", b"/ray/dashboard/")
_STEP: Final = 0.05
_TOKENS: Final = 80
# parts of all streams before a fault, and behind what it led to
_PARTS: Final = 400
# seconds until Ray knows that a process of its own is gone
_NOTICED: Final = 5.0

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
def ray_cluster() -> Iterator[Any]:
    """A head and two nodes on this host."""
    from ray.cluster_utils import Cluster

    memory = 80 << 20
    # its agent takes its time where other work is done, and its workers would be nice, as replicas
    # that they start would be too
    os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
    os.environ.setdefault("RAY_worker_niceness", "0")
    # a raylet that is gone is noticed within two seconds
    checks = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {
        "num_cpus": 0, "object_store_memory": memory, "include_dashboard": False,
        "_system_config": checks,
    }  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=4, object_store_memory=memory)
        yield cluster
    finally:
        cluster.shutdown()


def _make_whole(cluster: Any) -> None:
    """Add the nodes that a fault took. Ray does so in the main thread alone, which streams would
    wait for."""
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(num_cpus=4, object_store_memory=80 << 20)


def _raylet_killed(cluster: Any) -> Fault:
    async def fault(fleet: Fleet) -> None:
        names = {each.name for each in fleet.records()}
        node = cluster.worker_nodes.pop()
        node.kill_raylet()
        await asyncio.sleep(_NOTICED)
        # the streams are read meanwhile
        await asyncio.to_thread(node.kill_all_processes, check_alive=False, allow_graceful=False)
        # its replicas are processes of their own, and gateways see them: none is replaced
        left = {each.name for each in fleet.records()}
        assert left == names, (left, names, fleet.log()[-3000:])

    return fault


def _gcs_killed(cluster: Any) -> Fault:
    async def fault(fleet: Fleet) -> None:
        cluster.head_node.kill_gcs_server()
        await asyncio.sleep(_NOTICED)
        # nothing is placed without a head: the others have its streams
        _end(fleet, engine=False, how=signal.SIGKILL)

    return fault


async def _under_streams(
    fleet: Fleet, fault: Fault, streams: int, after: Callable[[], None]
) -> Streams:
    async with Streams(fleet, streams, tokens=_TOKENS).running() as found:
        await found.parts(_PARTS)
        await fault(fleet)
        await found.parts(_PARTS)
    after()
    return found


def faults(
    times: int,
    streams: int,
    chosen: dict[str, Fault],
    fleet_lines: str = "",
    after: Callable[[], None] = lambda: None,
) -> Any:
    """Return each fault's counts; every one happens ``times`` to a fleet of three, and ``after`` is
    called behind the streams of each."""
    rows: dict[str, Any] = {}
    serve = ("--backend", "null", "--null-step-time", str(_STEP))
    if not chosen:
        return rows
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(
            Path(folder), serve=serve, fleet_lines=fleet_lines,
            pool_lines="lease = 5\n" + ("resources = {CPU = 1}\n" if fleet_lines else ""),
        ) as fleet,
    ):  # fmt: skip
        asyncio.run(fleet.settled())
        for name, fault in chosen.items():
            rows[name] = isolated.repeated(
                name, times, partial(_under_streams, fleet, fault, streams, after)
            )
    return rows


def _of_ray(
    times: int, streams: int, only: str, idle_mb: float | None
) -> tuple[dict[str, Any], float | None]:
    """Return the counts of Ray's faults, and the memory of its processes."""
    chosen = {n: f for n, f in RAY_FAULTS.items() if only in n}
    rows: dict[str, Any] = {}
    if chosen or only in "raylet killed":
        with ray_cluster() as cluster:
            if only in "raylet killed":
                chosen["raylet killed"] = _raylet_killed(cluster)
            lines = f'ray = "{cluster.address}"'
            rows |= faults(times, streams, chosen, lines, partial(_make_whole, cluster))
            idle_mb = ray_mb()
    if only in "GCS and replica killed":
        # a head that was killed has forgotten its cluster: each time another one
        runs = []
        for _ in range(times):
            with ray_cluster() as cluster:
                lines = f'ray = "{cluster.address}"'
                fault = {"GCS and replica killed": _gcs_killed(cluster)}
                runs.append(faults(1, streams, fault, lines)["GCS and replica killed"])
        rows["GCS and replica killed"] = {
            **{key: sum(run[key] for run in runs) for key in ("runs", *isolated.SUMS)},
            "gap_p99_s": max(run["gap_p99_s"] for run in runs),
        }
    return rows, idle_mb


def main() -> int:
    """Run all faults and write their counts; return 1 where a stream was hurt."""
    times, streams = int(os.environ.get("FAULTS", "1")), int(os.environ.get("STREAMS", "32"))
    only = os.environ.get("ONLY", "")
    before: dict[str, Any] = {}
    if only and FOUND.exists():
        before = json.loads(FOUND.read_text())
    rows, missing = before.get("rows", {}), before.get("unmeasured", {})
    idle_mb = before.get("idle_mb")
    rows |= faults(times, streams, {n: f for n, f in FAULTS.items() if only in n})
    try:
        done = subprocess.run(isolated.command(), stdout=subprocess.PIPE, text=True, check=True)
        rows |= json.loads(done.stdout.splitlines()[-1])
        missing.pop("links and disks", None)
    except Unavailable as error:
        missing["links and disks"] = str(error)
        print(f"  links and disks: {error}", file=sys.stderr)
    if importlib.util.find_spec("ray") is None:
        if not any("Ray" in name for name in rows):
            missing["ray"] = 'Ray is not in this environment: pip install "paceline[ray]"'
            print(f"  faults of Ray: {missing['ray']}", file=sys.stderr)
    else:
        missing.pop("ray", None)
        found, idle_mb = _of_ray(times, streams, only, idle_mb)
        rows |= found
    told: dict[str, Any] = {"runs": sum(row["runs"] for row in rows.values())}
    told |= {key: sum(row[key] for row in rows.values()) for key in isolated.SUMS}
    told["gap_p99_s"] = max((row.get("gap_p99_s", 0.0) for row in rows.values()), default=None)
    FOUND.parent.mkdir(exist_ok=True)
    FOUND.write_text(json.dumps({**told, "rows": rows, "idle_mb": idle_mb, "unmeasured": missing}))
    print(json.dumps(told))
    return int(bool(told["failed"] or told["lost"] or told["doubled"]))


if __name__ == "__main__":
    sys.exit(main())
