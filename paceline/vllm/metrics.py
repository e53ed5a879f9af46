"""Our lines of vLLM's ``/metrics``, in Prometheus' text format. Names that our own server has, too,
mean the same. ``paceline:ready`` is not among them: by that, the gateway knows our own server.

This module does not import vLLM, and gets the numbers from ``channel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["METRICS", "metrics_lines"]

_LEVEL: Final = "paceline:memory_pressure_level"


class _Metric(NamedTuple):
    name: str
    kind: str
    text: str
    # (labels, value) pairs of one engine's counts
    read: Callable[[Mapping[str, Any]], Iterable[tuple[Mapping[str, str], float]]]


def _one(key: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda counts: (({}, counts[key]),)


def _each(key: str, label: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda counts: [({label: name}, value) for name, value in counts[key].items()]


def _pairs(key: str, *labels: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda counts: [
        (dict(zip(labels, names, strict=True)), value) for *names, value in counts[key]
    ]


METRICS: Final = (
    _Metric("paceline:steps", "counter", "Steps that the engine completed.", _one("num_steps")),
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
        "paceline:step_tokens", "counter",
        "Tokens computed: one of a request that is one behind (decode), or several (prefill).",
        _each("step_tokens", "kind"),
    ),
    _Metric(
        "paceline:step_seconds", "counter",
        "Time of the steps whose time was predicted, predicted and actual.",
        _each("step_seconds", "kind"),
    ),
    _Metric(
        "paceline:requests", "gauge", "Choices by SLO class, running or waiting.",
        _pairs("requests", "slo_class", "state"),
    ),
    _Metric(
        "paceline:queue_blocked", "gauge",
        "1 for what blocks the head of the queue now, 0 for the other reasons.",
        _each("blocked", "reason"),
    ),
    _Metric(
        "paceline:queue_blocked_seconds", "counter", "Seconds the head of the queue was blocked.",
        _each("waited", "reason"),
    ),
    _Metric(
        "paceline:requests_refused", "counter", "Requests refused or expired.",
        _each("refused", "reason"),
    ),
    _Metric(
        "paceline:requests_demoted", "counter",
        "Times a request was demoted: its first token or best-effort deadline would be late.",
        _one("demoted"),
    ),
    _Metric(
        "paceline:wasted_tokens", "counter",
        "Tokens computed again after a preemption, or for no request.", _each("wasted", "cause"),
    ),
    _Metric(
        "paceline:slo_requests", "counter",
        "Requests that ended, refused ones too: goodput_requests / slo_requests is attainment.",
        _each("ended", "slo_class"),
    ),
    _Metric(
        "paceline:goodput_requests", "counter", "Requests that met every target they had.",
        _each("kept", "slo_class"),
    ),
    _Metric(
        "paceline:slo_violations", "counter",
        "Targets missed, by class and kind: ttft, tpot, itl, deadline, unfinished, refused.",
        _pairs("missed", "slo_class", "kind"),
    ),
    _Metric(
        _LEVEL, "gauge",
        "Of the memory-pressure valve: 0 closed, 4 refusing.", _one("pressure_level"),
    ),
)  # fmt: skip


def metrics_lines(engines: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the lines of all engines' counts, each with the engine's number as a label. Of the
    pressure level only the highest is told: the gateway adds series up."""
    lines: list[str] = []
    for metric in METRICS if engines else ():
        suffix = "_total" if metric.kind == "counter" else ""
        lines.append(f"# HELP {metric.name}{suffix} {metric.text}")
        lines.append(f"# TYPE {metric.name}{suffix} {metric.kind}")
        if metric.name == _LEVEL:
            level = max(counts["pressure_level"] for counts in engines)
            lines.append(f"{metric.name} {level}")
            continue
        for number, counts in enumerate(engines):
            for labels, value in metric.read(counts):
                pairs = ",".join(f'{k}="{v}"' for k, v in {"engine": number, **labels}.items())
                lines.append(f"{metric.name}{suffix}{{{pairs}}} {value:.17g}")
    return "".join(f"{line}\n" for line in lines).encode()
