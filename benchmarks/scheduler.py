"""What one decision costs: schedule() + update(), without any model.

Method: a scheduler with RUNNING requests running and WAITING waiting is driven for STEPS steps over
results made up in advance (every row samples one token). Requests are long enough that the running
set is renewed as they finish: prompts of 256 tokens, outputs of 64 to 192, 16-token blocks, prefix
caching on. Timed is exactly what the engine's thread would spend per step: ``schedule`` plus
``update``. The garbage collector is left on, as in a server. Prints a table over the number waiting
and one JSON line for RUNNING = 256, WAITING = 10,000.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import StepResult
from paceline.core.request import Request, SamplingParams
from paceline.core.scheduler import Scheduler

RUNNING = 256
WAITING = (100, 1_000, 10_000, 100_000)
STEPS = 1_000


def measure(running: int, waiting: int, policy: str) -> list[float]:
    """Seconds of schedule + update, step by step."""
    rng = random.Random(0)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            policy=policy,
        ),
        CacheConfig(block_size=16, num_blocks=running * 40),
    )
    num_added = 0

    def add() -> None:
        nonlocal num_added
        scheduler.add_request(
            Request(
                request_id=f"request-{num_added}",
                prompt_token_ids=[rng.randrange(50_000) for _ in range(256)],
                sampling=SamplingParams(max_tokens=rng.randint(64, 192)),
                arrival_time=float(num_added),
            )
        )
        num_added += 1

    def step() -> float:
        started = time.perf_counter()
        plan = scheduler.schedule(float(num_added))
        planned = time.perf_counter()
        sampled = tuple((7,) if row.samples else () for row in plan.rows)
        result = StepResult(step_id=plan.step_id, sampled=sampled)
        resumed = time.perf_counter()
        scheduler.update(plan, result, float(num_added))
        return time.perf_counter() - resumed + planned - started

    for _ in range(running + waiting):
        add()
    while scheduler.stats().num_running < running:
        step()
    times = []
    for _ in range(STEPS):
        while scheduler.stats().num_waiting < waiting:
            add()
        times.append(step())
    scheduler.check_integrity()
    return times


def main() -> None:
    print(f"schedule() + update(), {RUNNING} running, {STEPS} steps, milliseconds")
    print(f"{'policy':>10} {'waiting':>8} {'p50':>7} {'p99':>7} {'max':>7}")
    results: dict[str, float] = {}
    for policy in ("fcfs", "priority"):
        for waiting in WAITING:
            times = sorted(1e3 * t for t in measure(RUNNING, waiting, policy))
            p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
            print(f"{policy:>10} {waiting:>8} {p50:7.3f} {p99:7.3f} {times[-1]:7.3f}")
            sys.stdout.flush()
            if policy == "fcfs" and waiting == 10_000:
                results = {
                    "running": RUNNING,
                    "waiting": waiting,
                    "p50_ms": round(p50, 4),
                    "p99_ms": round(p99, 4),
                }
    print(json.dumps({"bench": "scheduler", "results": results}))


if __name__ == "__main__":
    main()
