"""Draft tokens: the gain by their rate of acceptance, and cases with a loss.

A CPU whose steps wait for the weights up to seven rows, and take the time of their rows beyond,
which is about the case of int8 on the machines that were measured; the scheduler's own rule sets
the number of draft tokens, from step times and rates that it learns as in a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.studies.common import Run, Study, replica, serve
from paceline.core.outputs import SchedulerOutput
from paceline.sim.arrival import Arrival
from paceline.sim.pool import ReplicaSpec
from paceline.sim.report.table import text_table
from paceline.sim.workload.spec import open_workload

__all__ = ["CPU", "KINDS", "STUDY"]


@dataclass(frozen=True, slots=True)
class Cpu:
    """Seconds of a step: ``host + max(weights, rows * row) + keys * key``."""

    host: float = 0.3e-3
    weights: float = 4.7e-3
    row: float = 0.67e-3
    key: float = 0.4e-6

    def seconds(self, plan: SchedulerOutput) -> float:
        keys = sum(row.start for row in plan.rows)
        return self.host + max(self.weights, plan.num_tokens * self.row) + keys * self.key

    @property
    def seconds_of_a_row(self) -> float:
        """Seconds of a step of one row, at half of these requests' output."""
        return self.host + self.weights + (PROMPT + OUTPUT / 2) * self.key


CPU = Cpu()
# rate at which the first draft token of a row is right, and each one after a right one
KINDS: dict[str, tuple[float, float]] = {
    "code edit": (0.86, 0.95),
    "extraction": (0.75, 0.90),
    "rewrite": (0.50, 0.80),
    "open chat": (0.12, 0.50),
    "always wrong": (0.0, 0.0),
}
DRAFT_TOKENS = 8
STREAMS = (1, 2, 4, 8, 16, 64)
PROMPT, OUTPUT, ROUNDS = 128, 200, 6


def _spec(kind: str | None, policy: str = "fcfs") -> ReplicaSpec:
    """Return an engine without drafts, or with those of a kind of text."""
    spec = replica(CPU, max_num_batched_tokens=512, policy=policy)
    if kind is None:
        return spec
    first, later = KINDS[kind]
    acceptance = (first, *[later] * (DRAFT_TOKENS - 1))
    return replace(spec, config=replace(spec.config, acceptance=acceptance))


def _at_once(streams: int, tpot: float | None = None) -> list[Arrival]:
    """Return ``streams`` requests at a time, in rounds that do not overlap."""
    return [
        Arrival(at=20.0 * turn, prompt_tokens=PROMPT, output_tokens=OUTPUT, tpot=tpot)
        for turn in range(ROUNDS)
        for _ in range(streams)
    ]


def _tpot(run: Run) -> float:
    tpot = run.metrics.summary("").tpot
    assert tpot is not None
    return tpot.mean


def _streams() -> list[list[str]]:
    rows = [["times as fast as without", *(f"{count} at once" for count in STREAMS)]]
    plain = [_tpot(serve(_at_once(count), _spec(None))) for count in STREAMS]
    for kind in KINDS:
        drafted = [_tpot(serve(_at_once(count), _spec(kind))) for count in STREAMS]
        ratios = (off / on for off, on in zip(plain, drafted, strict=True))
        rows.append([kind, *(f"{ratio:.2f}" for ratio in ratios)])
    return rows


def _load() -> list[list[str]]:
    """Measure Poisson arrivals, of which a machine without drafts serves 2.3 a second."""
    head = ["requests/s", "", "TTFT p50", "TTFT p99", "TPOT mean", "TPOT p99", "E2E p99"]
    rows = [head]
    for rate in (0.5, 1.0, 2.0, 3.0, 4.0):
        workload = f"synthetic:rate={rate},prompt=fixed({PROMPT}),output=fixed({OUTPUT}),n=300"
        for name, kind in (("off", None), ("code edit", "code edit"), ("open chat", "open chat")):
            summary = serve(open_workload(workload, seed=3), _spec(kind)).metrics.summary("")
            ttft, tpot, e2e = summary.ttft, summary.tpot, summary.e2e
            assert ttft is not None and tpot is not None and e2e is not None
            values: Sequence[float] = (ttft.p50, ttft.p99, tpot.mean, tpot.p99, e2e.p99)
            figures = [f"{1e3 * value:.1f}" for value in values]
            rows.append([f"{rate:g}" if kind is None else "", name, *figures])
    return rows


def _targets() -> list[list[str]]:
    """Measure a TPOT target that no plain step meets: seven tenths of its time."""
    rows = [["met", *(f"{count} at once" for count in STREAMS[:4])]]
    target = 0.7 * CPU.seconds_of_a_row
    for kind in (None, *KINDS):
        met = []
        for count in STREAMS[:4]:
            run = serve(_at_once(count, target), _spec(kind, "deadline"))
            met.append(f"{run.metrics.summary('').attainment:.0%}")
        rows.append([kind or "off", *met])
    return rows


def tables() -> dict[str, str]:
    """Return tables of the gain, alone, under load, and with targets that need drafts."""
    return {
        "streams": text_table(_streams()),
        "load": text_table(_load()),
        "targets": text_table(_targets()),
    }


STUDY = Study("speculation", tables)
