"""The gateway: what it adds and costs, what becomes of streams whose engine dies, who gets what.

Three parts, each of which can be run alone (``PARTS=overhead,failover,routing``):

* ``overhead``: beside direct access and LiteLLM's proxy (``LITELLM=COMMAND``, its ``litellm`` from
  PyPI in an environment of its own), in turns; see ``overhead``;
* ``failover``: engines killed, stopped and cut off under 64 streams, ``TIMES`` each with the null
  backend, ``MODEL_TIMES`` each with the default model in int8 and bfloat16; see ``failover``;
* ``routing``: policies in the simulator, on pools with names and on random ones (``POOLS=N,SEED``);
  see ``routing``.

QUICK=1 takes one turn and one time of each. Prints what it finds on standard error as it goes and,
last, one JSON line.

    python -m benchmarks.gateway
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gateway.failover import FAULTS, failover
from benchmarks.gateway.overhead import overhead
from benchmarks.gateway.routing import routing
from paceline.bench.machine import machine

_QUICK = bool(os.environ.get("QUICK"))
_TURNS = 1 if _QUICK else 5
_SECONDS = 5.0 if _QUICK else 8.0
_TIMES = int(os.environ.get("TIMES") or (1 if _QUICK else 20))
_MODEL_TIMES = int(os.environ.get("MODEL_TIMES") or (0 if _QUICK else 5))
_NULL = ("--backend", "null", "--null-step-time", "0.02")


def _failover(folder: Path) -> dict[str, Any]:
    rows = {"null": failover(_NULL, _TIMES, FAULTS, folder)}
    for dtype in ("int8", "bfloat16") if _MODEL_TIMES else ():
        flags = ("--dtype", dtype, "--kv-cache-memory", "512MiB")
        rows[dtype] = failover(flags, _MODEL_TIMES, FAULTS, folder)
    told: dict[str, Any] = {
        name: sum(row[name] for row in rows.values())
        for name in ("streams", "lost_tokens", "doubled_tokens", "failed")
    }
    told["pause_p99_s"] = max(row.get("pause_p99_s", 0.0) for row in rows.values())
    return {**told, "rows": rows}


def main() -> int:
    parts = (os.environ.get("PARTS") or "overhead,failover,routing").split(",")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gateway-") as made:
        folder = Path(made)
        if "overhead" in parts:
            found = overhead(_TURNS, _SECONDS, os.environ.get("LITELLM") or None, folder)
            # at the rate at which requests come often enough to keep a core awake
            ours = found["added_ms"]["paceline 200/s"]
            results["overhead_ms"] = {name: ours[name]["median"] for name in ("p50", "p99")}
            results["rps_per_core"] = found["rps_per_core"]["paceline"]
            results["rps_per_core_litellm"] = found["rps_per_core"].get("litellm")
            results["relay_us_per_chunk"] = found["relay_us_per_chunk"]["paceline"]
            results["overhead"] = found
        if "failover" in parts:
            results["failover"] = _failover(folder)
        if "routing" in parts:
            seeds = (1,) if _QUICK else (1, 2, 3)
            count, _, seed = (os.environ.get("POOLS") or ("0" if _QUICK else "8,99")).partition(",")
            pools = (int(count), int(seed or 0))
            results["routing"] = routing(500 if _QUICK else 1500, 0.7, seeds, pools)
    print(json.dumps({"bench": "gateway", "machine": machine(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
