"""Our lines of vLLM's ``/metrics``, in Prometheus' text format. Names that our own server has, too,
mean the same.

This module does not import vLLM, and gets the numbers from ``channel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["METRICS", "metrics_lines"]


class _Metric(NamedTuple):
    name: str
    kind: str
    text: str
    # (labels, value) pairs of one engine's counts
    read: Callable[[Mapping[str, Any]], Iterable[tuple[Mapping[str, str], float]]]


def _one(key: str, **labels: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda counts: ((labels, counts[key]),)


def _each(key: str, label: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda counts: [({label: name}, value) for name, value in counts[key].items()]


METRICS: Final = (
    _Metric("paceline:steps", "counter", "Steps that the core planned.", _one("num_steps")),
    _Metric(
        "paceline:vllm_amended_steps", "counter",
        "Planned steps of which vLLM ran something else.", _one("num_amended"),
    ),
    _Metric(
        "paceline:vllm_own_steps", "counter",
        "Steps that vLLM scheduled by itself, after a fault.", _one("num_own_steps"),
    ),
    _Metric("paceline:vllm_faults", "counter", "Faults that ended pacing.", _one("num_faults")),
    _Metric(
        "paceline:step_seconds", "counter", "Predicted and actual seconds of steps.",
        lambda counts: (
            ({"kind": "predicted"}, counts["predicted_step_seconds"]),
            ({"kind": "actual"}, counts["actual_step_seconds"]),
        ),
    ),
    _Metric(
        "paceline:requests_refused", "counter", "Requests refused or expired.",
        _each("refused", "reason"),
    ),
    _Metric("paceline:requests_demoted", "counter", "Requests demoted.", _one("num_demoted")),
    _Metric(
        "paceline:slo_requests", "counter", "Requests with targets that ended.",
        _one("num_with_targets"),
    ),
    _Metric(
        "paceline:goodput_requests", "counter", "Requests that met every target they had.",
        _one("num_kept"),
    ),
    _Metric(
        "paceline:queue_blocked_seconds", "counter", "Seconds that the queue's head was blocked.",
        _each("waited", "reason"),
    ),
    _Metric(
        "paceline:requests", "gauge", "Requests that wait or run.",
        lambda counts: (
            ({"state": "running"}, counts["num_running"]),
            ({"state": "waiting"}, counts["num_waiting"]),
        ),
    ),
    _Metric(
        "paceline:memory_pressure_level", "gauge", "Level of the valve.", _one("pressure_level")
    ),
)  # fmt: skip


def metrics_lines(engines: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the lines of all engines' counts, each with the engine's number as a label."""
    lines: list[str] = []
    for metric in METRICS if engines else ():
        suffix = "_total" if metric.kind == "counter" else ""
        lines.append(f"# HELP {metric.name}{suffix} {metric.text}")
        lines.append(f"# TYPE {metric.name}{suffix} {metric.kind}")
        for number, counts in enumerate(engines):
            for labels, value in metric.read(counts):
                pairs = ",".join(f'{k}="{v}"' for k, v in {"engine": number, **labels}.items())
                lines.append(f"{metric.name}{suffix}{{{pairs}}} {value:.17g}")
    return "".join(f"{line}\n" for line in lines).encode()
