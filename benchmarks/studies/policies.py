"""Policies and tail latency: which requests are served first, and which wait longer for it.

One GPU at about 90 % of its capacity, bursty arrivals (cv 3), lognormal prompts and outputs, half
of the requests with a TTFT target and half with a deadline. *Known* lengths: a request's max_tokens
is its output's length. *Learned*: max_tokens does not depend on it, and the scheduler learns
lengths per class as requests end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.studies.common import PLAIN, Run, Study, replica, serve
from paceline.sim.report.plots import plot_cdfs
from paceline.sim.report.table import text_table
from paceline.sim.workload.spec import open_workload

__all__ = ["STUDY"]

# fcfs with all that PLAIN turns off
DEFAULTS = "fcfs, defaults"
POLICIES = ("fcfs", "sjf", "deadline", "static", DEFAULTS)
WORKLOAD = (
    "synthetic:rate=24,cv=3,prompt=lognormal(500,1.0),output=lognormal(120,1.0),n=1500,"
    "classes=chat(1,ttft=1,tpot=50ms)+report(1,deadline=20)"
)
MAX_TOKENS = 4096
# so few that requests queue for slots, not for the GPU
SLOTS = 64
SLOWER = ",speedup=0.8"


@cache
def _run(policy: str, known: bool, slots: int = 256) -> Run:
    settings: dict[str, Any] = dict.fromkeys(PLAIN, policy == DEFAULTS)
    spec = replica(
        policy=policy.removesuffix(", defaults"),
        max_num_seqs=slots,
        num_blocks=25_000,
        max_model_len=65_536,
        **settings,
    )
    if not known:
        spec = replace(spec, config=replace(spec.config, max_tokens=MAX_TOKENS))
    return serve(open_workload(WORKLOAD + (SLOWER if slots == SLOTS else ""), seed=1), spec)


def _rows(known: bool, slots: int = 256) -> list[list[str]]:
    rows = [
        [
            "policy",
            "TTFT mean",
            "TTFT p50",
            "TTFT p99",
            "E2E mean",
            "E2E p99",
            "p99 of longest quarter",
            "attainment %",
        ]
    ]
    for policy in POLICIES:
        run = _run(policy, known, slots).metrics.summary(policy)
        assert run.ttft is not None and run.e2e is not None and run.e2e_p99_longest is not None
        seconds = (
            run.ttft.mean,
            run.ttft.p50,
            run.ttft.p99,
            run.e2e.mean,
            run.e2e.p99,
            run.e2e_p99_longest,
        )
        cells = [f"{value:.2f}" for value in seconds]
        rows.append([policy, *cells, f"{100 * run.attainment:.1f}"])
    return rows


def tables() -> dict[str, str]:
    """Return tables of seconds, with known and learned lengths, and with few slots."""
    return {
        "known": text_table(_rows(True)),
        "learned": text_table(_rows(False)),
        "few-slots": text_table(_rows(True, SLOTS)),
    }


def plots(folder: Path) -> None:
    """Plot distributions with known lengths."""
    # static batches take minutes, next to which the others' seconds could not be told apart
    shown = [policy for policy in POLICIES if policy != "static"]
    runs = {policy: _run(policy, True, SLOTS).metrics for policy in shown}
    plot_cdfs(runs, folder / "policies.png")


STUDY = Study("policies", tables, plots)
