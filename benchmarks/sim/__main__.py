"""The simulator's accuracy and speed, and whether its decisions equal the engine's.

Method, part by part:

own        Two runs of ``paceline serve`` (default model, its defaults, prefix caching off), each a
           fresh process with an open-loop client here: lognormal lengths, Poisson arrivals, prompts
           cut from this project's documentation. The first is recorded (``--record``); step times
           and overheads are fitted to it, and those of the way between caller and engine to its
           callers' stamps. The second has other lengths and another rate: LOAD times the rate at
           which the fitted simulator works off a full queue, so below saturation. Predicted
           and measured are compared as callers see them, over all requests and request by request.
           A request attains its target with TTFT <= 1 s and TPOT <= 100 ms.
vllm       Every run below VLLM_RUNS (or the first argument), simulated from operator profiles, see
           ``paceline.sim.vllm_runs``: once from the operators alone, and once with the time that
           large steps took in addition on the *other* runs of the same hardware (leave one out;
           nothing is fitted to the run it is judged on). The errors with that time are the result;
           those of the operators alone are shown next to them. A run that cannot be predicted (no
           shape of its model, no profile) is reported and left out; ``--model-shape
           FILE`` (MODEL_SHAPE) gives more shapes.
speed      One replica, 10 requests per second, Azure-conversation lengths (means 1,155 and 211
           tokens, lognormal), Llama-3.1-8B on the roofline of an H100: simulated seconds per second
           of processor time, the best of three. Then MANY short requests (50 + 8 tokens, 300 per
           second), of which nothing is kept after they end: the process's peak memory.
decisions  One trace through the live engine in virtual time and through the simulator; every policy
           and two sizes of the KV cache; equal digests of all plans.

Errors are (predicted - measured) / measured. QUICK=1: shorter runs. PARTS=vllm,speed runs some
parts only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.parts import chosen
from benchmarks.common.processes import REPOSITORY
from benchmarks.common.statistics import percentile
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.sim.own import MODEL, Load, Seen, make_load, measure, serving
from benchmarks.sim.vllm import present, vllm
from paceline.bench.machine import machine
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.core.policies import POLICIES
from paceline.sim.arrival import Arrival, Served
from paceline.sim.live import DecisionLog, run_live
from paceline.sim.pool import Pool
from paceline.sim.recording import Recording
from paceline.sim.replica import Delays, ReplicaConfig
from paceline.sim.simulator import Simulator, Totals
from paceline.sim.step_times.base import FixedStepTimes, StepTimes
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.recorded import RecordedStepTimes, fit_delays
from paceline.sim.step_times.roofline import HardwareCard, RooflineStepTimes
from paceline.sim.vllm_runs.runs import find_runs

QUICK = os.environ.get("QUICK", "") not in ("", "0")
SECONDS = 25.0 if QUICK else 100.0
MANY = 20_000 if QUICK else 1_000_000
LOAD = 0.7
PARTS = ("decisions", "vllm", "speed", "own")
TTFT_TARGET, TPOT_TARGET = 1.0, 0.1
RECORDED = Load(2.0, SECONDS, (150.0, 0.8, 8, 900), (40.0, 0.7, 4, 160), seed=1)
# the rate is set when the capacity is known
TESTED = Load(1.0, SECONDS, (90.0, 0.9, 8, 1200), (60.0, 0.6, 8, 200), seed=2)
# requests that ``measure`` sends ahead
WARM_UP = 4


def simulate(
    config: ReplicaConfig, times: StepTimes, workload: Sequence[Arrival] | Iterator[Arrival]
) -> tuple[list[Served], Totals]:
    served: list[Served] = []
    totals = Simulator(Pool.single(config, times), served.append).run(workload)
    return sorted(served, key=lambda s: s.arrival.at), totals


# ---------------------------------------------------------------------- own server


def documentation() -> list[int]:
    """Return this project's documentation as tokens of the default model."""
    from paceline.cli.flags.options import resolve_path
    from paceline.engine.text.tokenizer import load_tokenizer

    text = "\n".join(path.read_text() for path in sorted(REPOSITORY.glob("docs/**/*.md")))
    tokenizer = load_tokenizer(Path(resolve_path(MODEL)[1]))
    return list(tokenizer.encode(text))


def recorded_run(load: Load, text: Sequence[int], folder: Path) -> tuple[Recording, list[Seen]]:
    """Serve a load; return the server's recording, and the callers' times."""
    path = folder / f"{load.seed}.jsonl"
    with serving(path) as port:
        seen = measure(port, make_load(load), text)
    recording = Recording.read(path)
    requests = recording.requests[WARM_UP:]
    begin = requests[0].arrival
    steps = tuple(step for step in recording.steps if step.planned >= begin)
    if recording.num_dropped:
        print(f"  {recording.num_dropped} records were dropped")
    return replace(recording, requests=requests, steps=steps), seen


def caller_delays(recording: Recording, seen: Sequence[Seen]) -> Delays:
    """Return the engine's own overheads and those of the way from and to the caller. Both sides
    stamp with the same clock; requests are matched by order of arrival."""
    inner = fit_delays(recording)
    pairs = list(zip(recording.requests, sorted(seen, key=lambda s: s.sent), strict=True))
    inbound = statistics.median(r.arrival - s.sent for r, s in pairs)
    outbound = statistics.median(s.first - (r.first_token or s.first) for r, s in pairs)
    return replace(inner, inbound=inner.inbound + max(0.0, inbound), outbound=max(0.0, outbound))


def own() -> dict[str, Any]:
    text = documentation()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recording, seen = recorded_run(RECORDED, text, folder)
        times = RecordedStepTimes(recording)
        delays = caller_delays(recording, seen)
        quality = times.quality
        print(
            f"  recorded {len(seen)} requests at {RECORDED.rate:g}/s, {quality.num_steps} steps; "
            f"fit: mean |error| {quality.mean_abs_error:.1%}, bias {quality.bias:+.1%}; "
            f"inbound {1e3 * delays.inbound:.1f} ms, outbound {1e3 * delays.outbound:.1f} ms"
        )
        config = replace(recording.config, delays=delays)
        capacity = saturated_rate(config, times)
        load = replace(TESTED, rate=LOAD * capacity)
        tested, measured = recorded_run(load, text, folder)
        begin = measured[0].sent - measured[0].arrival.at
    busy = sum(s.done - s.planned for s in tested.steps) / len(tested.steps)
    print(
        f"  tested {len(measured)} requests at {load.rate:.2f}/s, {LOAD:.0%} of {capacity:.2f}/s; "
        f"{len(tested.steps)} steps, {1e3 * busy:.0f} ms from plan to result"
    )
    drift = times.judge(tested)
    print(
        f"  the fit on the tested run's own steps: mean |error| {drift.mean_abs_error:.1%}, bias "
        f"{drift.bias:+.1%} (beyond the fit's own, the machine changed)"
    )
    # the clients' real arrivals, on the simulator's clock
    asked = sorted(
        (replace(s.arrival, at=max(0.0, s.sent - begin)) for s in measured), key=lambda a: a.at
    )
    served, _ = simulate(config, RecordedStepTimes(recording, seed=1), asked)
    ordered = sorted(measured, key=lambda s: s.sent)
    real = [
        Served(a, 0, None, s.first - begin, s.last - begin, a.output_tokens, 0, 0)
        for a, s in zip(asked, ordered, strict=True)
    ]
    return compare_own(served, real, load.rate / capacity)


def saturated_rate(config: ReplicaConfig, times: StepTimes) -> float:
    """Return requests per second if all are there at the start."""
    burst = [replace(a, at=0.0) for a in make_load(replace(TESTED, rate=2.0, seconds=100.0))]
    served, _ = simulate(config, times, burst)
    ends = sorted(s.last_token or 0.0 for s in served)
    # the last requests run with empty slots, so they do not count
    most = int(0.8 * len(ends))
    return most / ends[most - 1]


def compare_own(
    predicted: Sequence[Served], measured: Sequence[Served], load: float
) -> dict[str, Any]:
    """Return signed errors, and the accuracy for single requests."""

    def error(of: Callable[[Sequence[Served]], float]) -> float:
        return round(of(predicted) / of(measured) - 1.0, 4)

    def throughput(of: Sequence[Served]) -> float:
        end = max(s.last_token or 0.0 for s in of)
        return sum(s.output_tokens for s in of) / (end - of[0].arrival.at)

    def attainment(of: Sequence[Served]) -> float:
        met = [(s.ttft or 0) <= TTFT_TARGET and (s.tpot or 0) <= TPOT_TARGET for s in of]
        return sum(met) / len(met)

    results: dict[str, Any] = {
        "ttft_mean_err": error(lambda of: statistics.mean(present(s.ttft for s in of))),
        "ttft_p50_err": error(lambda of: statistics.median(present(s.ttft for s in of))),
        "ttft_p99_err": error(lambda of: percentile(present(s.ttft for s in of), 0.99)),
        "tpot_mean_err": error(lambda of: statistics.mean(present(s.tpot for s in of))),
        "e2e_mean_err": error(lambda of: statistics.mean(present(s.e2e for s in of))),
        "throughput_err": error(throughput),
        "attainment_diff": round(attainment(predicted) - attainment(measured), 4),
        "attainment": round(attainment(measured), 4),
        "load": round(load, 3),
        "requests": len(measured),
    }
    for metric in ("ttft", "tpot", "e2e"):
        pairs = [
            (getattr(p, metric), getattr(m, metric))
            for p, m in zip(predicted, measured, strict=True)
            if getattr(p, metric) is not None and getattr(m, metric) is not None
        ]
        results[f"{metric}_request_err"] = round(
            statistics.mean(abs(p / m - 1.0) for p, m in pairs), 4
        )
        results[f"{metric}_correlation"] = round(
            statistics.correlation([p for p, _ in pairs], [m for _, m in pairs]), 4
        )
        for side, of in (("predicted", predicted), ("measured", measured)):
            values = present(getattr(s, metric) for s in of)
            print(
                f"  {metric:>4} {side:>9}: mean {1e3 * statistics.mean(values):8.1f} ms, p50 "
                f"{1e3 * statistics.median(values):8.1f}, p99 {1e3 * percentile(values, 0.99):8.1f}"
            )
    return results


# ---------------------------------------------------------------------- speed and memory


def azure_like(count: int, seed: int = 0) -> Iterator[Arrival]:
    """Yield 10 requests per second with the Azure conversation trace's mean lengths."""
    rng = random.Random(seed)
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(10.0)
        # medians that give means of 1,155 and 211 tokens
        prompt = min(8000, max(1, round(840.0 * rng.lognormvariate(0.0, 0.8))))
        output = min(1000, max(1, round(153.0 * rng.lognormvariate(0.0, 0.8))))
        yield Arrival(at, prompt, output)


def short(count: int) -> Iterator[Arrival]:
    rng = random.Random(0)
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(300.0)
        yield Arrival(at, rng.randint(1, 99), rng.randint(1, 15))


def speed() -> tuple[float, float, Totals]:
    """Return simulated seconds per second of processor time, and peak resident MB over MANY."""
    times = RooflineStepTimes(HardwareCard.named("H100-SXM"), ModelShape.named("Llama-3.1-8B"))
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_model_len=16384),
        cache=CacheConfig(
            block_size=16, num_blocks=times.num_blocks(16), enable_prefix_caching=False
        ),
    )

    def run(workload: Iterator[Arrival]) -> tuple[float, Totals]:
        started = time.process_time()
        totals = Simulator(Pool.single(config, times), lambda _: None).run(workload)
        return totals.end / (time.process_time() - started), totals

    # nothing here makes reference cycles, so the collector would find nothing
    gc.freeze()
    gc.disable()
    best = max(run(azure_like(2_000))[0] for _ in range(3))
    _, totals = run(short(MANY))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gc.enable()
    return best, peak, totals


# ---------------------------------------------------------------------- decisions


def identical_decisions() -> bool:
    times = FixedStepTimes(0.005, 0.0001)
    equal = True
    for policy in sorted(POLICIES):
        for num_blocks in (2000, 150):
            config = ReplicaConfig(
                scheduler=SchedulerConfig(
                    max_num_batched_tokens=512, max_num_seqs=32, max_model_len=2048, policy=policy
                ),
                cache=CacheConfig(block_size=16, num_blocks=num_blocks),
            )
            log = DecisionLog()

            def note(
                _: int,
                plan: SchedulerOutput,
                now: float,
                start: float,
                end: float,
                log: DecisionLog = log,
            ) -> None:
                log.add(plan, now)

            Simulator(Pool.single(config, times), lambda _: None, on_plan=note).run(trace())
            live = run_live(trace(), config, times)
            same = log.digest() == live.digest()
            equal = equal and same
            print(
                f"  {policy:>14}, {num_blocks:>5} blocks: {live.num_plans:>5} plans, "
                f"{'identical' if same else 'DIFFERENT'}"
            )
    return equal


def trace() -> Iterator[Arrival]:
    rng = random.Random(3)
    at = 0.0
    for number in range(100):
        at += rng.expovariate(20.0)
        yield Arrival(
            at,
            rng.randint(1, 600),
            rng.randint(1, 80),
            prefix=(number % 5,) if number % 2 else (),
            tenant=f"t{number % 4}",
            priority=number % 3,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.sim")
    default = os.environ.get("VLLM_RUNS") or "../shared/vllm-runs"
    parser.add_argument("folder", nargs="?", type=Path, default=Path(default))
    shape = os.environ.get("MODEL_SHAPE")
    parser.add_argument("--model-shape", type=Path, default=Path(shape) if shape else None)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    models = ModelShape.read(arguments.model_shape) if arguments.model_shape else ()
    parts = chosen(PARTS)
    results: dict[str, Any] = {}
    unmeasured = Unmeasured()
    if "decisions" in parts:
        with unmeasured.part("decisions"):
            print("identical decisions: live engine and simulator")
            results["identical_decisions"] = identical_decisions()
    if "vllm" in parts:
        with unmeasured.part("vllm"):
            print(f"recorded vLLM runs in {folder}")
            if find_runs(folder):
                results |= vllm(folder, models)
            else:
                print("  none there: left out")
                results["vllm"] = {}
    if "speed" in parts:
        with unmeasured.part("speed"):
            print("speed and memory")
            fast, peak, totals = speed()
            results["speed_x"], results["peak_rss_mb"] = round(fast, 1), round(peak, 1)
            print(
                f"  {fast:.0f} simulated seconds per second of processor time; "
                f"{totals.num_arrivals:,} requests, {totals.num_steps:,} steps: peak {peak:.0f} MB"
            )
            sys.stdout.flush()
    if "own" in parts:
        with unmeasured.part("own"):
            print("our own live server")
            results["own"] = own()
    told = {"bench": "sim", "machine": machine(), "results": results}
    print(json.dumps(told | {"unmeasured": unmeasured.reasons}))
    return unmeasured.exit_code


if __name__ == "__main__":
    sys.exit(main())
