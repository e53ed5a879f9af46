"""The report of a run: the figures of ``paceline simulate``, with the same definitions
(``paceline.sim.report.metrics``), and those of live runs only: failures, and the generator's delay.

Latencies count from the moment a request was sent. In an open loop goodput is the rate at which
requests were sent times attainment; in a closed one, which only sends after answers, it is the
requests per second of the whole run that met their targets.

This module does not know clocks or sockets.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from paceline.bench.answers import Outcome
from paceline.sim.arrival import Arrival, Served
from paceline.sim.report.metrics import Distribution, Metrics, Summary
from paceline.sim.report.table import text_table

__all__ = ["LATE_SECONDS", "Report", "make_report"]

# 99th percentile of the generator's delay, s, above which it counts as not keeping up: its delay is
# part of the latencies
LATE_SECONDS: Final = 0.01
# width of a terminal; sentences and servers' messages are broken between words
_COLUMNS: Final = 80
_LATENCIES: Final = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2e"))


@dataclass(frozen=True, slots=True)
class Report:
    """One run. Times in seconds."""

    summary: Summary
    # the same, value by value, for plots
    metrics: Metrics
    outcomes: tuple[Outcome, ...]
    # answered requests, and refused or failed ones by kind
    ok: int
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    # message of the first failure of each kind
    details: Mapping[str, str]
    # requests a second as planned and as sent; None in a closed loop, or for a single request
    offered_rate: float | None
    sent_rate: float | None
    total_token_rate: float
    # requests in flight, on average and at most
    concurrency: float
    peak_concurrency: int
    # how output tokens were counted: "usage", "chunks" or both
    counted: str
    # whether any request had a target
    has_targets: bool
    # delays, s: of sends in an open loop, and of a timer of the generator
    late: Distribution | None
    lag: Distribution | None
    interrupted: bool = False

    @property
    def kept_up(self) -> bool:
        """Whether the generator was in time, so that the latencies are the server's."""
        return all(d is None or d.p99 <= LATE_SECONDS for d in (self.late, self.lag))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that a reader of the figures must know."""
        found = []
        if self.interrupted:
            found.append(
                "The run was interrupted: requests in flight are left out, mostly the longest."
            )
        if not self.kept_up:
            late = max(d.p99 for d in (self.late, self.lag) if d is not None)
            found.append(
                f"The generator could not keep up: at the 99th percentile it was {1e3 * late:.1f} "
                "ms late, which latencies include. Give it a core of its own, or a lower rate."
            )
        if self.counted != "usage" and self.ok:
            found.append(
                "Output tokens are counted by chunks where the server sent no usage: a chunk may "
                "hold several."
            )
        return tuple(found)

    def table(self) -> str:
        """Format the report for a terminal, and for Markdown."""
        parts = [text_table(self.rows()), text_table(self.latency_rows())]
        kinds = [_wrapped(f"{kind}: {words}") for kind, words in self.details.items() if words]
        warnings = map(_wrapped, self.warnings)
        return "\n\n".join([*parts, *(["\n".join(kinds)] if kinds else []), *warnings])

    def rows(self) -> list[list[str]]:
        """Return figures that are one number each; the first row is the head."""
        run = self.summary
        rows = [["", run.name], ["requests", str(run.requests)], ["ok", str(self.ok)]]
        rows += [[f"refused: {kind}", str(count)] for kind, count in self.refused.items()]
        rows += [[f"failed: {kind}", str(count)] for kind, count in self.failed.items()]
        if self.offered_rate is not None and self.sent_rate is not None:
            rows.append(["requests/s offered", f"{self.offered_rate:.2f}"])
            rows.append(["requests/s sent", f"{self.sent_rate:.2f}"])
        rows += [
            ["requests/s finished", f"{run.request_rate:.2f}"],
            ["in flight, mean", f"{self.concurrency:.1f}"],
            ["in flight, most", str(self.peak_concurrency)],
            ["seconds", f"{run.duration:.1f}"],
            ["prompt tokens", str(run.prompt_tokens)],
            [f"output tokens (by {self.counted})", str(run.output_tokens)],
            ["output tokens/s", f"{run.token_rate:.1f}"],
            ["total tokens/s", f"{self.total_token_rate:.1f}"],
        ]
        if run.cached_tokens:
            share = run.cached_tokens / run.prompt_tokens
            rows.append(["prompt tokens cached %", f"{100 * share:.1f}"])
        if self.has_targets:
            rows.append(["goodput requests/s", f"{run.goodput:.2f}"])
            rows.append(["attainment %", f"{100 * run.attainment:.1f}"])
            if len(run.by_class) > 1:
                for name, entry in run.by_class.items():
                    rows.append([f"attainment {name} %", f"{100 * entry.attainment:.1f}"])
        rows.append(["generator kept up", "yes" if self.kept_up else "NO"])
        return rows

    def latency_rows(self) -> list[list[str]]:
        """Return latencies in milliseconds; the first row is the head."""
        rows = [["ms", "mean", "p50", "p90", "p99", "max"]]
        found = [(label, getattr(self.summary, name)) for label, name in _LATENCIES]
        for label, d in [*found, ("sent late", self.late), ("generator late", self.lag)]:
            if d is not None:
                values = (d.mean, d.p50, d.p90, d.p99, d.max)
                rows.append([label, *(f"{1e3 * value:.1f}" for value in values)])
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return plain values for json.dumps: figures, and every request with its times."""
        return {
            "summary": self.summary.as_json(),
            "ok": self.ok,
            "refused": dict(self.refused),
            "failed": dict(self.failed),
            "details": dict(self.details),
            "offered_rate": self.offered_rate,
            "sent_rate": self.sent_rate,
            "total_token_rate": self.total_token_rate,
            "concurrency": self.concurrency,
            "peak_concurrency": self.peak_concurrency,
            "counted": self.counted,
            "kept_up": self.kept_up,
            "interrupted": self.interrupted,
            "late": None if self.late is None else asdict(self.late),
            "lag": None if self.lag is None else asdict(self.lag),
            "warnings": list(self.warnings),
            "requests": [asdict(outcome) for outcome in self.outcomes],
        }


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def make_report(
    outcomes: Sequence[Outcome],
    *,
    name: str = "",
    lags: Sequence[float] = (),
    interrupted: bool = False,
) -> Report:
    """Compute all figures of a run.

    Args:
        lags: seconds by which timers of the generator were late.
        interrupted: whether requests in flight were given up.
    """
    metrics = Metrics()
    refused: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    details: dict[str, str] = {}
    counts: Counter[str] = Counter()
    gaps: list[Any] = []
    for outcome in outcomes:
        metrics.add(_served(outcome))
        if outcome.failure:
            (refused if outcome.refused else failed)[outcome.failure] += 1
            details.setdefault(outcome.failure, outcome.detail)
        else:
            counts["usage" if outcome.output_tokens else "chunks"] += 1
            gaps.append(np.diff(outcome.chunks))
    summary = metrics.summary(name)
    # computed from all values, without a sketch
    itl = Distribution.of(np.concatenate(gaps)) if gaps else None
    summary = replace(summary, itl=itl)
    dues = [outcome.due for outcome in outcomes if outcome.due is not None]
    sent_rate = _rate([outcome.sent for outcome in outcomes]) if dues else None
    if sent_rate is not None:
        summary = replace(summary, goodput=summary.attainment * sent_rate)
    elif summary.duration > 0:
        met = sum(entry.met for entry in summary.by_class.values())
        summary = replace(summary, goodput=met / summary.duration)
    lates = [outcome.sent - outcome.due for outcome in outcomes if outcome.due is not None]
    mean, peak = _in_flight(outcomes)
    tokens = summary.prompt_tokens + summary.output_tokens
    return Report(
        summary=summary,
        metrics=metrics,
        outcomes=tuple(outcomes),
        ok=sum(counts.values()),
        refused=dict(refused.most_common()),
        failed=dict(failed.most_common()),
        details=details,
        offered_rate=_rate(dues),
        sent_rate=sent_rate,
        total_token_rate=tokens / summary.duration if summary.duration else 0.0,
        concurrency=mean,
        peak_concurrency=peak,
        counted=" and ".join(sorted(counts, reverse=True)) or "usage",
        has_targets=any(target is not None for outcome in outcomes for target in outcome.slo),
        late=Distribution.of(np.array(lates)),
        lag=Distribution.of(np.array(lags)),
        interrupted=interrupted,
    )


def _served(outcome: Outcome) -> Served:
    """Convert an outcome to the simulation's form. A failure has no tokens, whatever came first."""
    ttft, tpot, deadline = outcome.slo
    arrival = Arrival(
        outcome.sent,
        outcome.prompt_tokens or outcome.asked_prompt_tokens or 0,
        outcome.asked_output_tokens,
        slo_class=outcome.slo_class,
        ttft=ttft,
        tpot=tpot,
        deadline=deadline,
        tenant=outcome.tenant,
    )
    chunks = () if outcome.failure else outcome.chunks
    return Served(
        arrival,
        replica=0,
        first_scheduled=None,
        first_token=chunks[0] if chunks else None,
        last_token=chunks[-1] if chunks else None,
        output_tokens=outcome.tokens,
        cached_tokens=outcome.cached_tokens or 0,
        preemptions=0,
        refused=outcome.refused,
        reason=outcome.failure,
    )


def _rate(times: Sequence[float]) -> float | None:
    """Return events per second from the first to the last: gaps, one less than events, by time."""
    if len(times) < 2 or max(times) <= min(times):
        return None
    return (len(times) - 1) / (max(times) - min(times))


def _in_flight(outcomes: Sequence[Outcome]) -> tuple[float, int]:
    """Return the mean over the time from the first to the last, and the maximum."""
    if not outcomes:
        return 0.0, 0
    events = sorted(
        # at the same moment, ends count before starts
        [(outcome.sent, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes]
    )
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    span = events[-1][0] - events[0][0]
    area = sum(outcome.ended - outcome.sent for outcome in outcomes)
    return (area / span if span > 0 else float(most)), most
