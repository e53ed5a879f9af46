"""Recorded vLLM runs predicted from operator profiles: the "vllm" part of ``sim``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.sim.step_times.models import ModelShape
from paceline.sim.vllm_runs.host import HostTime, for_run, measure
from paceline.sim.vllm_runs.prediction import predict, step_times
from paceline.sim.vllm_runs.runs import VllmRun, find_runs

__all__ = ["METRICS", "present", "vllm"]


def present(values: Iterator[float | None]) -> list[float]:
    return [value for value in values if value is not None]


METRICS: dict[str, Callable[[Sequence[Any]], float]] = {
    "ttft_mean": lambda of: statistics.mean(present(x.ttft for x in of)),
    "ttft_p50": lambda of: statistics.median(present(x.ttft for x in of)),
    "tpot_mean": lambda of: statistics.mean(present(x.tpot for x in of)),
    "e2e_mean": lambda of: statistics.mean(present(x.e2e for x in of)),
}


def vllm(folder: Path, models: Sequence[ModelShape] = ()) -> dict[str, Any]:
    """Return errors of every run, by name; those of the operators alone; and skipped runs."""
    profiles = folder / "profiles"
    runs: list[VllmRun] = []
    hosts: list[HostTime] = []
    skipped: dict[str, str] = {}
    for path in find_runs(folder):
        try:
            run = VllmRun.read(path, models)
            host = measure(run, step_times(run, profiles))
        except PacelineError as error:
            skipped[path.name] = str(error)
            print(f"  {path.name}: left out: {error}")
            continue
        runs.append(run)
        if host is not None:
            hosts.append(host)
            print(
                f"  {run.name}: large steps take {1e3 * host.seconds_per_layer:.3f} ms a layer "
                f"beside their operators (median of {host.num_steps} steps)"
            )
    results: dict[str, dict[str, float]] = {}
    alone: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}
    for run in runs:
        host_seconds = for_run(run, hosts)
        try:
            bare = predict(run, profiles)
            served = predict(run, profiles, host_seconds=host_seconds) if host_seconds else bare
        except PacelineError as error:
            skipped[run.name] = str(error)
            print(f"  {run.name}: left out: {error}")
            continue
        refused = sum(s.refused for s in served)
        if refused:
            print(f"  {run.name}: {refused} requests are refused here, and count in no mean")
        rows: tuple[dict[str, float], dict[str, float]] = ({}, {})
        for name, of in METRICS.items():
            theirs = of(run.requests)
            for row, ours in zip(rows, (served, bare), strict=True):
                row[f"{name}_err"] = round(of(ours) / theirs - 1.0, 4)
            print(
                f"  {run.name:>26} {name:>9}: vLLM {1e3 * theirs:9.1f} ms; operators alone "
                f"{1e3 * of(bare):9.1f} ms, {of(bare) / theirs - 1.0:+.1%}; with "
                f"{1e3 * host_seconds:4.1f} ms a large step, measured on the others, "
                f"{1e3 * of(served):9.1f} ms, {of(served) / theirs - 1.0:+.1%}"
            )
        results[run.name], alone[run.name] = rows
        seconds[run.name] = round(host_seconds, 6)
    return {
        "vllm": results,
        "vllm_operators_alone": alone,
        "vllm_host_s": seconds,
        "vllm_left_out": skipped,
    }
