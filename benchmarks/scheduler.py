"""Cost of one decision: schedule() + update(), without any model.

Method: a scheduler with RUNNING requests running and WAITING waiting is driven for STEPS steps over
results made up in advance (every row samples one token). Requests are long enough that the running
set is renewed as they finish: prompts of 256 tokens, outputs of 64 to 192, 16-token blocks, prefix
caching on. The time is exactly that of the engine's thread per step: ``schedule`` plus
``update``. The garbage collector is on, set as an engine process sets it. Prints a table
over the number waiting, each figure the median of ROUNDS runs, and one JSON line for RUNNING = 256,
WAITING = 10,000. ``alone`` is the p99 over the steps of each one's fastest run: all runs make the
same decisions, so that is their cost without disturbance. ``door`` and the p99 after it are those
of ``add_request`` between steps, with the forecast. Rows ``everything``: the default policy
with forecasts, pacing, swapping and the pressure valve at work (see ``measure``).
Rows ``fair-10`` and ``fair-each``: the same under ``fair``, with ten tenants and with one for each
request.

``BASELINE=CHECKOUT`` compares with another checkout instead: PAIRS (20) pairs of runs by turns,
each in a process of its own, A B, B A, A B, ..., of the rows ``fcfs``, ``everything`` and
``fair-10`` with 10,000 waiting. Printed are the median ratios of p50 and p99, of decisions and at
the door, this checkout's by the other's, with the 95 % interval of their geometric mean (bootstrap
over pairs).
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.statistics import paired_ratio
from paceline.bench.machine import machine
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import StepResult
from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.slo import NO_SLO, Slo
from paceline.engine.process.garbage import collected_seldom

RUNNING = 256
WAITING = (100, 1_000, 10_000, 100_000)
STEPS = 1_000
# name: policy, everything, tenants (None: one for each request), numbers waiting
ROWS: dict[str, tuple[str, bool, int | None, tuple[int, ...]]] = {
    "fcfs": ("fcfs", False, 1, WAITING),
    "priority": ("priority", False, 1, WAITING),
    "everything": ("deadline", True, 1, WAITING),
    "fair-10": ("fair", True, 10, (1_000, 10_000)),
    "fair-each": ("fair", True, None, (1_000, 10_000)),
}
# runs of each row, of which medians are shown. One for the longest queue: filling it takes longer
# than the steps
ROUNDS = 5


def step_seconds(shape: StepShape) -> float:
    """Return the reported seconds of a step, where steps are timed."""
    return 1e-3 + 1e-5 * (shape.wide_tokens + shape.narrow_rows)


def measure(
    running: int,
    waiting: int,
    policy: str,
    *,
    everything: bool = False,
    tenants: int | None = 1,
    door: list[float] | None = None,
) -> list[float]:
    """Return the seconds of schedule + update, step by step. Those of ``add_request`` between these
    steps are appended to ``door``. ``everything``: a quarter each of the
    requests have targets, have none, and are best effort without and with a deadline; steps are
    timed, so that all forecasts are at work; swapping and the valve are on. Requests of ``tenants``
    tenants arrive by turns; None: each request is another tenant's."""
    rng = random.Random(0)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            policy=policy,
            pressure_threshold=0.88 if everything else 1.0,
        ),
        CacheConfig(
            block_size=16,
            num_blocks=running * (24 if everything else 40),
            num_host_blocks=running * 8 if everything else 0,
            swap_block_seconds=1e-4,
        ),
    )
    now = 0.0
    kinds = (
        Slo(ttft=60.0, tpot=0.05),
        Slo(),
        Slo(best_effort=True),
        Slo(best_effort=True, deadline=30.0),
    )
    num_added = 0

    def add() -> None:
        nonlocal num_added
        request = Request(
            RequestSpec(
                request_id=f"request-{num_added}",
                prompt_token_ids=[rng.randrange(50_000) for _ in range(256)],
                sampling=SamplingParams(max_tokens=rng.randint(64, 192)),
                arrival_time=now if everything else float(num_added),
                slo=kinds[num_added % len(kinds)] if everything else NO_SLO,
                tenant=f"tenant-{num_added if tenants is None else num_added % tenants}",
            )
        )
        started = time.perf_counter()
        scheduler.add_request(request)
        if door is not None and num_added >= running + waiting:
            door.append(time.perf_counter() - started)
        num_added += 1

    def step() -> float:
        nonlocal now
        at = now if everything else float(num_added)
        started = time.perf_counter()
        plan = scheduler.schedule(at)
        planned = time.perf_counter()
        sampled = tuple((7,) if row.samples else () for row in plan.rows)
        elapsed = step_seconds(StepShape.of(plan.rows))
        now += elapsed
        result = StepResult(step_id=plan.step_id, sampled=sampled, elapsed=elapsed)
        resumed = time.perf_counter()
        scheduler.update(plan, result, at + elapsed)
        return time.perf_counter() - resumed + planned - started

    for _ in range(running + waiting):
        add()
    for _ in range(running):
        if scheduler.stats().num_running == running:
            break
        step()
    times = []
    with collected_seldom():
        for _ in range(STEPS):
            while scheduler.stats().num_waiting < waiting:
                add()
            times.append(step())
    scheduler.check_integrity()
    return times


# a checkout that is compared need not time its door itself
_RUN = """
import json, sys, time
from benchmarks.scheduler import RUNNING, Scheduler, measure
policy, everything, tenants = json.loads(sys.argv[1])
door, add = [], Scheduler.add_request
def timed(scheduler, request):
    started = time.perf_counter()
    add(scheduler, request)
    door.append(time.perf_counter() - started)
Scheduler.add_request = timed
steps = measure(RUNNING, 10_000, policy, everything=everything, tenants=tenants)
print(json.dumps([steps, door[RUNNING + 10_000 :]]))
"""


def _figures(checkout: Path, row: str) -> dict[str, float]:
    """Return p50 and p99 of one run of a row in milliseconds, of decisions and at the door, in a
    process of its own."""
    command = [sys.executable, "-c", _RUN, json.dumps(ROWS[row][:3])]
    run = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    steps, door = json.loads(run.stdout)
    p50, p99 = _p50_p99(steps)
    door_p50, door_p99 = _p50_p99(door)
    return {"p50": p50, "p99": p99, "door p50": door_p50, "door p99": door_p99}


def _p50_p99(seconds: list[float]) -> tuple[float, float]:
    """Return both in milliseconds."""
    times = sorted(1e3 * each for each in seconds)
    return statistics.median(times), times[int(len(times) * 0.99)]


def compare(baseline: Path, pairs: int) -> None:
    """Print ratios to a baseline, see the module's docstring."""
    here = Path(__file__).parents[1]
    results: dict[str, Any] = {"pairs": pairs}
    print(f"schedule() + update() here by that in {baseline}, {pairs} pairs by turns")
    print(f"{'row':>10} {'':>8} {'here ms':>8} {'there ms':>8} {'ratio':>6} {'95 %':>15}")
    for row in ("fcfs", "everything", "fair-10"):
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for turn in range(pairs):
            both = [(ours, here), (theirs, baseline)]
            for found, checkout in both if turn % 2 == 0 else reversed(both):
                found.append(_figures(checkout, row))
        for name in ours[0]:
            ratio = paired_ratio([f[name] for f in ours], [f[name] for f in theirs])
            here_ms, there_ms = (statistics.median(f[name] for f in own) for own in (ours, theirs))
            print(
                f"{row:>10} {name:>8} {here_ms:8.3f} {there_ms:8.3f} {ratio.median:6.3f} "
                f"{ratio.low:7.3f}-{ratio.high:.3f}",
                flush=True,
            )
            results[f"{row}_{name.replace(' ', '_')}"] = [round(each, 4) for each in ratio]
    print(json.dumps({"bench": "scheduler-turns", "results": results}))


def main() -> None:
    if baseline := os.environ.get("BASELINE"):
        compare(Path(baseline).resolve(), int(os.environ.get("PAIRS") or 20))
        return
    print(f"schedule() + update(), {RUNNING} running, {STEPS} steps, milliseconds")
    head = ("waiting", "p50", "p99", "max", "alone", "door", "p99")
    print(f"{'policy':>10} {head[0]:>8} {' '.join(f'{each:>7}' for each in head[1:])}")
    results: dict[str, float] = {}
    for policy, (order, everything, tenants, lengths) in ROWS.items():
        for waiting in lengths:
            runs, doors = [], []
            fastest = [math.inf] * STEPS
            for _ in range(ROUNDS if waiting <= 10_000 else 1):
                door: list[float] = []
                spent = measure(
                    RUNNING, waiting, order, everything=everything, tenants=tenants, door=door
                )
                doors.append(_p50_p99(door))
                times = sorted(1e3 * t for t in spent)
                fastest = list(map(min, fastest, spent))
                runs.append((statistics.median(times), times[int(len(times) * 0.99)], times[-1]))
            p50, p99, most = map(statistics.median, zip(*runs, strict=True))
            alone = 1e3 * sorted(fastest)[int(STEPS * 0.99)]
            door_p50, door_p99 = map(statistics.median, zip(*doors, strict=True))
            row = f"{policy:>10} {waiting:>8} {p50:7.3f} {p99:7.3f} {most:7.3f} {alone:7.3f}"
            print(f"{row} {door_p50:7.3f} {door_p99:7.3f}")
            sys.stdout.flush()
            if policy == "fcfs" and waiting == 10_000:
                results |= {
                    "running": RUNNING,
                    "waiting": waiting,
                    "p50_ms": round(p50, 4),
                    "p99_ms": round(p99, 4),
                    "p99_alone_ms": round(alone, 4),
                }
            if everything and waiting == 10_000:
                name = policy.replace("-", "_")
                results |= {
                    f"{name}_p50_ms": round(p50, 4),
                    f"{name}_p99_ms": round(p99, 4),
                    f"{name}_p99_alone_ms": round(alone, 4),
                    f"{name}_door_p50_ms": round(door_p50, 4),
                    f"{name}_door_p99_ms": round(door_p99, 4),
                }
    print(json.dumps({"bench": "scheduler", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
