"""The gateway: its latency and cost, its choice of engines, and streams whose engine dies.

Three parts, each of which can be run alone (``PARTS=overhead,routing,failover``):

* ``overhead``: compared with direct access and LiteLLM's proxy, in turns; see ``overhead``.
  LiteLLM is given as ``LITELLM=install``, which sets it up in an environment of its own, or as
  ``LITELLM=COMMAND``; without either it is left out, and the first line says so.
  ``ROUTERS=install`` does the same for sglang-router and vllm-router. Function calls per chunk:
  see ``calls``;
* ``routing``: policies in the simulator, on pools with names and on random ones (``POOLS=N,SEED``);
  see ``routing``;
* ``failover``: engines killed, stopped and cut off under 64 streams, ``TIMES`` (20) each with the
  null backend, ``MODEL_TIMES`` (5) each with the default model in int8 and bfloat16; see
  ``failover``.

Times: ``overhead`` takes about 4 minutes (runs of 4 s: 30 for added time, 20 for processor time, of
which the streamed half lasts a second longer), LiteLLM one more and each of ``ROUTERS`` one and a
half more; ``routing`` as long as the processors need for 288 simulations of 1,500 requests; and
``failover`` ``MINUTES`` (6) of its own, whatever the others took: then each fault has happened at
least once with each engine, and no further one begins; ``times`` is the number of each. All
``TIMES`` and ``MODEL_TIMES`` need ``MINUTES=40``. ``seconds`` in the result is the time of each
part. QUICK=1 takes one turn and one time of each. Prints its findings on standard error as it goes
and, last, one JSON line, in which ``unmeasured`` names the parts that could not be measured, and
why.

Goodput (``routing``) is that of loads at or below the engines' joint capacity, where no queue grows
with time, so there is no long run: 1,500 requests are compared with the same requests under another
policy. Queues under lasting overload are the engine's matter: ``make bench NAME=overload``.

    python -m benchmarks.gateway
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Unavailable
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.gateway.calls import calls_per_chunk
from benchmarks.gateway.failover import FAULTS, failover
from benchmarks.gateway.options import (
    ROUTERS,
    Options,
    OptionsError,
    litellm_command,
    router_pythons,
)
from benchmarks.gateway.overhead import overhead
from benchmarks.gateway.routing import routing
from paceline.bench.machine import machine
from paceline.checkpoints.hub.resolve import default_cache_dir

_TURNS = 5
_SECONDS = 4.0
_NULL = ("--backend", "null", "--null-step-time", "0.02")


def _litellm(options: Options) -> str | None:
    """Return LiteLLM's command, set up if wanted, and print whether it is measured."""
    if "overhead" not in options.parts:
        return None
    command, why = litellm_command(options.litellm, _peers() / "litellm")
    print(f"LiteLLM: {command or f'left out: {why}'}", file=sys.stderr, flush=True)
    return command


def _routers(options: Options) -> dict[str, Path]:
    """Return, by name, the interpreters of other routers' environments; see ``_litellm``."""
    if "overhead" not in options.parts:
        return {}
    found, missing = router_pythons(options.routers, _peers())
    for name in ROUTERS:
        told = found.get(name) or f"left out: {missing[name]}"
        print(f"{name}: {told}", file=sys.stderr, flush=True)
    return found


def _peers() -> Path:
    return Path(os.environ.get("PACELINE_PEERS") or default_cache_dir() / "peers")


def _overhead(
    options: Options,
    litellm: str | None,
    routers: dict[str, Path],
    folder: Path,
    unmeasured: Unmeasured,
) -> dict[str, Any]:
    turns = 1 if options.quick else _TURNS
    found = overhead(turns, _SECONDS, litellm, routers, folder, unmeasured)
    # at this rate requests arrive often enough to keep a core awake
    ours = found["added_ms"].get("paceline 200/s")
    told = {
        "overhead_ms": ours and {name: ours[name]["median"] for name in ("p50", "p99")},
        "rps_per_core": found["rps_per_core"].get("paceline"),
        "rps_per_core_litellm": found["rps_per_core"].get("litellm"),
        "relay_us_per_chunk": found["relay_us_per_chunk"].get("paceline"),
        "overhead": found,
    }
    with unmeasured.part("calls a chunk"):
        told["calls_per_chunk"] = calls_per_chunk()
    return told


def _failover(options: Options, folder: Path, unmeasured: Unmeasured) -> dict[str, Any]:
    """Measure failover; the slowest parts share the rest of ``options.minutes`` from now."""
    deadline = time.monotonic() + 60.0 * options.minutes
    rows = {}
    formats = ("int8", "bfloat16") if options.model_times else ()
    for number, name in enumerate(("null", *formats)):
        left = deadline - time.monotonic()
        until = time.monotonic() + left / (1 + len(formats) - number)
        flags, times = _NULL, options.times
        if name != "null":
            flags, times = ("--dtype", name, "--kv-cache-memory", "512MiB"), options.model_times
        with unmeasured.part(f"failover, {name}"):
            rows[name] = failover(flags, times, FAULTS, until, folder, unmeasured)
    if not rows:
        raise Unavailable("none of its servers was measured")
    told: dict[str, Any] = {
        name: sum(row[name] for row in rows.values())
        for name in ("streams", "lost_tokens", "doubled_tokens", "failed")
    }
    pauses = [row["pause_p99_s"] for row in rows.values() if "pause_p99_s" in row]
    told["pause_p99_s"] = max(pauses, default=None)
    return {**told, "rows": rows}


def main() -> int:
    try:
        options = Options.read(os.environ)
    except OptionsError as error:
        print(error, file=sys.stderr)
        return 2
    litellm, routers = _litellm(options), _routers(options)
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    unmeasured = Unmeasured()
    with tempfile.TemporaryDirectory(prefix="gateway-") as made:
        folder = Path(made)
        for part in options.parts:
            began = time.monotonic()
            print(f"{part}:", file=sys.stderr, flush=True)
            with unmeasured.part(part):
                if part == "overhead":
                    results |= _overhead(options, litellm, routers, folder, unmeasured)
                elif part == "routing":
                    size = (500, (1,)) if options.quick else (1500, (1, 2, 3))
                    results[part] = routing(size[0], 0.7, size[1], options.pools)
                else:
                    results[part] = _failover(options, folder, unmeasured)
            seconds[part] = round(time.monotonic() - began, 1)
    told = {"bench": "gateway", "machine": machine(), "seconds": seconds, "results": results}
    print(json.dumps(told | {"unmeasured": unmeasured.reasons}))
    return unmeasured.exit_code


if __name__ == "__main__":
    sys.exit(main())
