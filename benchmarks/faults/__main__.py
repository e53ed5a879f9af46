"""What clients see when something breaks, and how long until all is well again.

Method: one ``paceline serve`` on the default model, as it comes but for a few flags (a small KV
cache, room for all restarts, short bounds for hanging steps and slow readers). First every prompt
is answered while nothing is wrong; those token ids are what every later answer is held against. A
token lost or doubled is an answer that differs, or a broken one that is not the beginning. Then one
fault after the other, each seen from its clients' side:

* the engine process killed (SIGKILL) and stopped (SIGSTOP) under 64 streams and 16 requests that
  are not streamed; recovery is from the signal until ``/health/ready`` says 200;
* ``/metrics`` ten times a second beside 64 streams;
* 1,000 connections that say nothing beside 200 streams;
* 100 callers who ask for much and read nothing, beside 16 who read;
* 10,000 malformed requests of a dozen kinds, beside 16 good ones;
* SIGTERM under load.

Memory is the resident size of the API process. ``--rows`` takes some of them. Prints a table and,
last, one JSON line.

    python -m benchmarks.faults
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults.rows import ROWS, Row, reference
from benchmarks.faults.server import FaultyServer

FLAGS = (
    "--kv-cache-memory", "512MiB", "--max-engine-restarts", "20", "--stall-timeout", "20",
    "--slow-reader-timeout", "3", "--log-level", "warning",
)  # fmt: skip


def run(model: str, names: list[str]) -> dict[str, Row]:
    results: dict[str, Row] = {}
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        FaultyServer(model, Path(folder) / "log", *FLAGS) as server,
    ):
        load = asyncio.run(reference(server))
        for name in names:
            began = time.monotonic()
            row: Row = asyncio.run(ROWS[name](server, load))
            row["seconds"] = round(time.monotonic() - began, 1)
            results[name] = row
            print(f"\n{name}", flush=True)
            for key, value in row.items():
                print(f"  {key.replace('_', ' '):40} {value}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    args = parser.parse_args()
    results = run(args.model, args.rows)
    print(json.dumps({"bench": "faults", "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
