"""Effects of faults on clients, and the time until the server has recovered.

Method: one ``paceline serve`` on the default model, with defaults but for a few flags (a small KV
cache, room for all restarts, short bounds for hanging steps and slow readers). First every prompt
is answered without any fault; every later answer is compared with those token ids. A whole answer
that differs, or a broken one that is not the beginning, has lost, doubled or changed tokens. Then
one fault after the other, each seen from its clients' side:

* the engine process killed (SIGKILL) and stopped (SIGSTOP) under 64 streams and 16 requests that
    are not streamed, TIMES (1) times each; recovery is from the signal to 200 of ``/health/ready``.
    They are greedy and sampled, with penalties, with a JSON schema and of two choices, by turns;
  * ``/metrics`` ten times a second during 64 streams;
  * 1,000 silent connections during 200 streams;
  * 100 callers who request long answers and read nothing, next to 16 who read;
  * 10,000 malformed requests of a dozen kinds, next to 16 good ones;
* SIGTERM under load;
* on a second server, whose batch folder is a file system of its own of 8 MiB: the disk full in the
  middle of a batch of 200 lines, then not; the Redis that counts for rate limits killed, then back.

Memory is the resident size of the API process. ``--rows`` selects some of the faults. Prints a
table and, last, one JSON line.

    python -m benchmarks.faults
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.unmeasured import Unmeasured
from benchmarks.faults.rows import ROWS, Row, reference
from benchmarks.faults.server import FaultyServer
from benchmarks.faults.storage import Redis, disk_full, redis_gone, small_disk
from paceline.bench.machine import machine

FLAGS = (
    "--kv-cache-memory", "512MiB", "--max-engine-restarts", "60", "--stall-timeout", "20",
    "--slow-reader-timeout", "3", "--log-level", "warning",
)  # fmt: skip


DISK, REDIS = "disk full during a batch", "Redis gone"


def show(name: str, work: Coroutine[Any, Any, Row] | Row) -> Row:
    """Measure a row and print it."""
    began = time.monotonic()
    row = work if isinstance(work, dict) else asyncio.run(work)
    row["seconds"] = round(time.monotonic() - began, 1)
    print(f"\n{name}", flush=True)
    for key, value in row.items():
        print(f"  {key.replace('_', ' '):44} {value}", flush=True)
    return row


def storage_rows(
    model: str,
    folder: Path,
    names: list[str],
    flags: Sequence[str],
    results: dict[str, Row],
    unmeasured: Unmeasured,
) -> None:
    """Measure the two rows that need a disk and a Redis to break; report where there is none."""
    disk = folder / "disk"
    disk.mkdir()
    around = small_disk(disk)
    has_redis = shutil.which("redis-server") is not None
    with contextlib.ExitStack() as stack:
        flags = [*flags, "--batch-dir", str(disk / "batches")]
        redis = Redis(folder)
        if has_redis:
            stack.enter_context(redis)
            flags += ["--rate-limit-storage", redis.url, "--rate-limit-requests", "100000/minute"]
        server = stack.enter_context(
            FaultyServer(model, folder / "log-2", *flags, around=around or ())
        )
        load = asyncio.run(reference(server))
        if DISK in names:
            absent: Row = {"not_measured": "no file system can be mounted here (unshare)"}
            work = disk_full(server, load, disk / "batches") if around else absent
            with unmeasured.part(DISK):
                results[DISK] = show(DISK, work)
        if REDIS in names:
            absent = {"not_measured": "there is no redis-server here"}
            with unmeasured.part(REDIS):
                work = redis_gone(server, load, redis) if has_redis else absent
                results[REDIS] = show(REDIS, work)


def run(
    model: str, names: list[str], flags: Sequence[str], unmeasured: Unmeasured
) -> dict[str, Row]:
    """Return the rows that could be measured; ``unmeasured`` gets the others."""
    results: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as made:
        folder = Path(made)
        first = [name for name in names if name in ROWS]
        if first:
            log = folder / "log"
            with (
                unmeasured.part("a server's faults"),
                FaultyServer(model, log, *flags, "--batch-dir", "off") as server,
            ):
                load = asyncio.run(reference(server))
                for name in first:
                    with unmeasured.part(name):
                        results[name] = show(name, ROWS[name](server, load))
        if len(first) < len(names):
            with unmeasured.part("faults of its storage"):
                storage_rows(model, folder, names, flags, results, unmeasured)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    rows = [*ROWS, DISK, REDIS]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW")
    parser.add_argument("--dtype", default="auto", help="of the weights, as paceline serve has it")
    args = parser.parse_args()
    unmeasured = Unmeasured()
    results = run(args.model, args.rows, [*FLAGS, "--dtype", args.dtype], unmeasured)
    told = {"bench": "faults", "machine": machine(), "dtype": args.dtype, "results": results}
    print(json.dumps(told | {"unmeasured": unmeasured.reasons}))
    return unmeasured.exit_code


if __name__ == "__main__":
    sys.exit(main())
