"""vLLM by itself against vLLM with Paceline's scheduler inside: without a model, and live on a CPU.

Both run vLLM's CPU build in an environment of its own, which this command makes in the peers'
folder (PACELINE_PEERS); ``paceline`` is imported there from this checkout.

Virtual (``virtual``). vLLM's real ``AsyncScheduler``, ``KVCacheManager`` and ``Request`` without a
model, on a virtual clock with the step times of an 8B model on an H100, roughly. Prompts have 64 to
768 tokens, 15 % of them 2,000 to 3,500; outputs 32 to 256. Targets: first token within 0.5 s (long
prompts: 3 s), 25 ms a token after that. Poisson arrivals at three rates, the same for vLLM with
8,192 and with 2,048 tokens a step and for the core's plan carried out. ``kept`` is the share of
requests within both targets. The cases after that have random aborts, shared prefixes, and little
or much memory: every step is compared with the plan as amended, and all counters with vLLM's; a
difference ends the run. ``fairness_p99_ratio`` is the p99 of first tokens of a tenant with 4
requests a second next to one with 40, over the same alone, under the policy ``fair``; for vLLM
under its own. ``retry_after_kept`` is the share of refused callers that are served when they first
come back, at the advised time, after an overload of 36 a second with ``max_predicted_ttft_s`` 2.
``overhead_us_per_step`` is the time in Python at 64 running and about 1,000 waiting: vLLM's own
methods, and what the core and the mirror add.

Live (``live``). vLLM's server with the default model in bfloat16: as it is (``plain``), with the
core's plan (``paced``), and with a few numbers of tokens a step and of requests, of which the best
is ``tuned``. All are started first and wait; each load then goes to one after another, so that a
machine whose speed drifts is the same for all: vLLM's capacity by a closed loop, and Poisson
arrivals at multiples of it, in TURNS turns, every second one in the opposite order; what is printed
are all turns together. Targets: first token within 2 s, and after that five times the
seconds that a token takes a request which has vLLM to itself (the strict target of Sarathi-Serve,
OSDI'24, is five times a step without prompts): with a fixed one, whether a machine can meet it next
to prompts decides. All are judged at 0.1 s a token as well (``plain, 0.1 s``; ``paced, 0.1 s`` is a
run with those targets, and prompts of its own, which no cache holds). ``possible`` is
capacity / rate: at 0.1 s a token a machine that needs half of it for the rows alone cannot reach
that. A request that is refused, or not complete within 30 s, counts as not kept. ``sustained`` is
the core's plan at the highest rate for five minutes, and ``below_capacity`` is half of the
capacity.
``identical_greedy`` is the share of greedy answers that are those of ``plain``, asked alone and
together: in bfloat16 an answer depends on what else is in a step (``make test-upstreams
KINDS=paced`` compares them in float32).

QUICK=1 runs a fifth of the arrivals, and one live rate of smaller requests with fewer tries. PARTS
chooses of virtual and live, RATE_SECONDS=n is the time of each live rate (30), SUSTAINED_SECONDS=n
that of the sustained one (300), TURNS=n the turns (2; one with QUICK=1), and VLLM=0.31.0 another
version, in a folder of its own. What was not measured is absent, and named in ``absent`` with the
reason, or in ``not_run``.

The last line is JSON, also after SIGTERM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.common.ours import our_places
from benchmarks.common.processes import REPOSITORY, Unavailable
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.peers.vllm_cpu import VERSION, VllmCpu
from benchmarks.vllm.live import Load, Windows, Work, measure
from paceline.bench.machine import machine

PARTS: Final = ("virtual", "live")
RATES: Final = (16.0, 22.0, 28.0)
CONTENDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "vllm, 8,192 tokens": {"scheduler": "vllm", "tokens": 8192},
    "vllm, 2,048 tokens": {"scheduler": "vllm", "tokens": 2048},
    "paced": {"scheduler": "paced", "tokens": 8192},
}
# blocks of 16 tokens: from less than two long requests' to more than all together need
BLOCKS: Final = (600, 2_000, 8_000, 30_000)
# share of steps that may be amended where memory is not short
MOST_AMENDED: Final = 0.02
ARRIVALS: Final = 1_500
SLOWER_TPOT: Final = 0.1
# a server on two cores that serves 2.5 a second, of 32 requests at once
COSTLY_PROMPTS: Final[Mapping[str, Any]] = {"cpu": True, "rate": 3.05, "tpot": 0.1}
# of live work with QUICK=1, so that a busy machine completes it
QUICKER: Final[Mapping[str, Any]] = {
    "short": (16, 64), "long": (150, 300), "outputs": (4, 8), "outstanding": 8,
    "tuned": ((256, 16),),
}  # fmt: skip


class Runs(Protocol):
    """An environment with vLLM."""

    @property
    def python(self) -> Path: ...

    def environment(self) -> tuple[tuple[str, str], ...]: ...


def run_cases(peer: Runs, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of ``virtual``'s cases, run in vLLM's environment. Raises Unavailable."""
    lines = "".join(json.dumps(dict(case)) + "\n" for case in cases)
    environment = {**os.environ, **dict(peer.environment()), "PYTHONPATH": str(REPOSITORY),
                   "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.run(
            [peer.python, "-m", "benchmarks.vllm.virtual"], input=lines, text=True,
            stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=REPOSITORY, check=False,
        )  # fmt: skip
        found = [json.loads(line) for line in process.stdout.splitlines() if line[:1] == "{"]
        if process.returncode or len(found) < len(cases):
            errors.seek(0)
            tail = " | ".join(errors.read().strip().splitlines()[-4:])
            raise Unavailable(f"case {dict(cases[len(found)])} ended: {tail}")
    return found


def cost_case(running: int) -> dict[str, Any]:
    """Return the case that measures planning with so many running and about 1,000 waiting."""
    return {"scheduler": "paced", "rate": 0.0, "count": 1_250, "seqs": running,
            "lengths": [256, 64], "waiting": [900, 1_100]}  # fmt: skip


def overhead_of(costs: Mapping[str, Any]) -> dict[str, float]:
    """Return the microseconds of vLLM's own methods in each step, and what the plug-in adds."""
    own, total = costs["vllm_us_per_step"], costs["us_per_step"]
    return {"vllm": own, "added": round(total - own, 1), "ratio": round(total / own - 1.0, 3)}


def virtual(peer: VllmCpu, quick: bool) -> dict[str, Any]:
    """Return the figures of the virtual part, and print its tables."""
    count = ARRIVALS // 5 if quick else ARRIVALS
    rated = [
        {**settings, "rate": rate, "count": count}
        for rate in RATES
        for settings in CONTENDERS.values()
    ]
    checked = [
        {"scheduler": "paced", "rate": rate, "count": count // 5, "seed": seed, "blocks": blocks,
         "aborted": 0.2, "shared": 0.5, "checks": True}
        for blocks in BLOCKS
        for seed, rate in enumerate((10.0, 22.0))
    ]  # fmt: skip
    cost = cost_case(64)
    fair = [
        {"scheduler": name, "rate": 4.0, "flood": flood, "count": count // 5,
         "settings": {"policy": "fair"}}
        for name in ("vllm", "paced")
        for flood in (0.0, 40.0)
    ]  # fmt: skip
    # what short steps cost: the same arrivals with a slower pace
    slower = {"scheduler": "paced", "rate": RATES[1], "count": count, "tpot": SLOWER_TPOT}
    returns = {"scheduler": "paced", "rate": 36.0, "count": count, "returns": True,
               "settings": {"max_predicted_ttft_s": 2.0}}  # fmt: skip
    costly = [{**COSTLY_PROMPTS, "scheduler": name, "count": count // 5}
              for name in ("vllm", "paced")]  # fmt: skip
    *found, theirs, flooded, ours, paced, slow, back, plain, saving, costs = run_cases(
        peer, [*rated, *checked, *fair, slower, returns, *costly, cost]
    )
    rates: dict[str, dict[str, Any]] = {}
    print(f"{'a second':>9} {'':20}{'kept':>7}{'short':>7}{'long':>7}{'p99 s':>8}{'tok/s':>8}"
          f"{'us/step':>9}{'amended':>9}")  # fmt: skip
    for case, result in zip(rated, found, strict=False):
        name = next(n for n, s in CONTENDERS.items() if s.items() <= case.items())
        rates.setdefault(f"{case['rate']:g}", {})[name] = result
        print(
            f"{case['rate']:9g} {name:20}{result['kept']:7.3f}{result['short_kept']:7.3f}"
            f"{result['long_kept']:7.3f}{result['ttft_p99_s']:8.2f}{result['tokens_per_s']:8.0f}"
            f"{result['us_per_step']:9.0f}{result.get('amended', 0.0):9.4f}"
        )
    properties = []
    print(
        f"\n{'blocks':>9}{'a second':>9}{'exact':>7}{'compared':>9}{'amended':>9}{'preempted':>10}"
    )
    for case, result in zip(checked, found[len(rated) :], strict=False):
        short = result["preemptions"] > 0
        if not result["exact"] or (result["amended"] >= MOST_AMENDED and not short):
            raise AssertionError(f"{case}: {result}")
        properties.append({"blocks": case["blocks"], "rate": case["rate"], **result})
        print(f"{case['blocks']:9,}{case['rate']:9g}{result['exact']!s:>7}{result['compared']:9,}"
              f"{result['amended']:9.4f}{result['preemptions']:10,}")  # fmt: skip
    ratios = {
        "vllm": round(flooded["ttft_p99_s"] / theirs["ttft_p99_s"], 2),
        "paced": round(paced["ttft_p99_s"] / ours["ttft_p99_s"], 2),
    }
    print(f"\na tenant next to a flood, p99 of first tokens over that alone: {ratios}")
    most = rates[f"{RATES[1]:g}"]
    whole, short = most["vllm, 8,192 tokens"]["tokens_per_s"], most["paced"]["tokens_per_s"]
    throughput = {"25 ms": round(short / whole, 3),
                  "100 ms": round(slow["tokens_per_s"] / whole, 3)}  # fmt: skip
    print(f"tokens a second over vLLM's at {RATES[1]:g} a second, by the target of a token: "
          f"{throughput}; kept at 100 ms: {slow['kept']}")  # fmt: skip
    print(
        f"{back['refused']} of {count:,} refused, served on their first return after the "
        f"overload {back['served_on_return']}, at last {back['served_at_last']}"
    )
    prompts = {"vllm": plain["kept"], "paced": saving["kept"]}
    print(f"kept where any prompt makes a step long: {prompts}")
    overhead = overhead_of(costs)
    print(f"\n64 running, 1,000 waiting: vLLM's own {overhead['vllm']:.0f} us a step, added "
          f"{overhead['added']:.0f} us ({overhead['ratio']:.2f} times)")  # fmt: skip
    return {
        "rates": rates, "properties": properties, "throughput": throughput,
        "costly_prompts": prompts,
        "overhead_us_per_step": overhead, "fairness_p99_ratio": ratios,
        "retry_after_kept": back["served_on_return"],
    }  # fmt: skip


def main() -> int:
    """Print tables and the JSON line; return 1 after an unexpected error."""
    quick = os.environ.get("QUICK") == "1"
    parts = tuple(filter(None, os.environ.get("PARTS", ",".join(PARTS)).split(",")))
    chosen = parts
    if unknown := sorted(set(parts) - set(PARTS)):
        print(f"there is no part {', '.join(unknown)}; parts are {', '.join(PARTS)}",
              file=sys.stderr)  # fmt: skip
        return 2
    rate = float(os.environ.get("RATE_SECONDS", "30"))
    sustained = max(rate, float(os.environ.get("SUSTAINED_SECONDS", rate if quick else "300")))
    places, vocabulary = our_places()
    version = os.environ.get("VLLM", VERSION)
    peer = VllmCpu(places, version)
    results: dict[str, Any] = {}
    failed = Unmeasured()
    try:
        with failed.part("vllm"):
            peer.setup()
        if failed.reasons:
            parts = ()
        if "virtual" in parts:
            with failed.part("virtual"):
                results["virtual"] = found = virtual(peer, quick)
                for name in ("overhead_us_per_step", "fairness_p99_ratio", "retry_after_kept"):
                    results[name] = found.pop(name)
                amended = [each["paced"]["amended"] for each in found["rates"].values()]
                results["amended_share"] = max(amended)
        if "live" in parts:
            work = Work(vocabulary=vocabulary)
            work = replace(work, **QUICKER) if quick else work
            turns = max(1, int(os.environ.get("TURNS", "1" if quick else "2")))
            windows = Windows(capacity=min(20.0, rate), rate=rate, sustained=sustained, turns=turns)
            with failed.part("live"), tempfile.TemporaryDirectory() as folder:
                loads = tuple(map(Load, (1.5,) if quick else (1.2, 1.5)))
                measure(peer, work, Path(folder), loads, windows, failed, results)
    except (KeyboardInterrupt, SystemExit) as ended:
        failed.reasons["rest"] = f"{type(ended).__name__} ended the run"
        raise
    finally:
        report = {"bench": "vllm", "results": results, "machine": machine(), "quick": quick}
        report["version"] = version
        if left := [part for part in PARTS if part not in chosen]:
            report["not_run"] = left
        print(json.dumps(report | ({"absent": failed.reasons} if failed.reasons else {})))
    return failed.exit_code


if __name__ == "__main__":
    sys.exit(main())
