"""Equal requests at constant rates: the worst minute, waiting requests, and forecasts; with and
without best effort that waits all the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.overload.judging import (
    MINUTE,
    Ratios,
    Shares,
    by_minute,
    ideal,
    of_possible,
    ratios,
)
from benchmarks.overload.serving import (
    CAPACITY,
    CHAT,
    EQUAL,
    PLACES,
    SERVICE,
    STEP,
    as_served,
    best_effort,
    chats,
    in_time,
    play,
    times,
)
from paceline.sim.arrival import Served
from paceline.sim.report.table import text_table

__all__ = ["BESIDE", "FEWER", "Outcome", "Rate", "figures", "rate", "tables"]

# servers that are also run while best effort waits
BESIDE = ("deadline", "priority", "fair")
# number of seeds for these policies: few are enough, as their figures have no limits
FEWER = {"sjf": 2, "phase-aligned": 2}


class Rate(NamedTuple):
    """One run."""

    server: str
    load: float
    seed: int
    minutes: int
    # best effort waits all the time
    beside: bool


class Outcome(NamedTuple):
    """Results of a run."""

    # shares by the minute: of the possible requests, of all requests, and of an ideal server
    shares: list[float]
    attained: list[float]
    ideal: list[float]
    most_waiting: int
    refused: int
    # predicted over actual times to first token, by kind: all but best effort, the late ones among
    # these, and best effort
    forecasts: dict[str, list[float]]
    # best effort's share in the worst ten seconds; None: no best effort waited
    share: float | None


def rate(asked: Rate) -> Outcome:
    """Serve the minutes, and a few seconds more, or no requests would follow those of the last."""
    end = asked.minutes * MINUTE
    stream = chats(times([(end + 5.0, asked.load)], asked.seed))
    both = [*stream, *(best_effort(end + 5.0, asked.seed) if asked.beside else ())]
    both.sort(key=lambda arrival: arrival.at)
    watch = Shares(both) if asked.beside else None
    config = as_served(asked.server, max_num_seqs=PLACES)
    run = play(config, EQUAL, both, until=end + 5.0, watch=watch)
    judged = [
        (arrival.at, in_time(served))
        for arrival, served in zip(run.arrivals, run.outcomes, strict=True)
        if arrival.ttft is not None
    ]
    minutes = by_minute(judged, asked.minutes)
    assert CHAT.ttft is not None
    moments = [at for at, _ in judged]
    best = zip(moments, ideal(moments, PLACES, SERVICE, CHAT.ttft - STEP), strict=True)
    return Outcome(
        of_possible(minutes, CAPACITY),
        [each.kept / each.came for each in minutes],
        of_possible(by_minute(best, asked.minutes), CAPACITY),
        run.most_waiting,
        sum(each is not None and each.refused for each in run.outcomes),
        {
            "all": ratios(run.outcomes, _is_chat),
            "late": ratios(run.outcomes, _is_late),
            "best effort": ratios(run.outcomes, lambda served: not _is_chat(served)),
        },
        None if watch is None else watch.least(10.0, end),
    )


def _is_chat(served: Served) -> bool:
    return served.arrival.ttft is not None


def _is_late(served: Served) -> bool:
    target = served.arrival.ttft
    return target is not None and served.ttft is not None and served.ttft > target


def figures(found: Mapping[Rate, Outcome]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return figures by server and load, over all seeds."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for server, load in dict.fromkeys((asked.server, asked.load) for asked in found):
        alone = _of(found, server, load, beside=False)
        beside = _of(found, server, load, beside=True)
        entry: dict[str, Any] = {}
        if alone:
            entry |= _entry(alone)
        if beside:
            forecasts = Ratios.of([r for each in beside for r in each.forecasts["best effort"]])
            entry |= {
                "worst_minute_beside_best_effort": round(min(min(e.shares) for e in beside), 3),
                "best_effort_share_min": round(min(e.share or 0.0 for e in beside), 4),
                "best_effort_forecast_p50_ratio": forecasts.p50,
                "best_effort_forecast_p90_ratio": forecasts.p90,
            }
        results.setdefault(server, {})[f"{load:g}"] = entry
    return results


def _of(found: Mapping[Rate, Outcome], server: str, load: float, *, beside: bool) -> list[Outcome]:
    return [
        outcome
        for asked, outcome in found.items()
        if (asked.server, asked.load, asked.beside) == (server, load, beside)
    ]


def _entry(runs: Sequence[Outcome]) -> dict[str, Any]:
    whole = Ratios.of([r for each in runs for r in each.forecasts["all"]])
    late = Ratios.of([r for each in runs for r in each.forecasts["late"]])
    return {
        "worst_minute_of_possible": round(min(min(each.shares) for each in runs), 3),
        "mean_minute_of_possible": round(fmean(s for each in runs for s in each.shares), 3),
        "ideal_worst_minute": round(min(min(each.ideal) for each in runs), 3),
        "worst_minute_of_ideal": round(min(_of_ideal(each) for each in runs), 3),
        "max_waiting": max(each.most_waiting for each in runs),
        "refused": sum(each.refused for each in runs),
        "forecast_p50_ratio": whole.p50,
        "forecast_p90_ratio": whole.p90,
        "late_served": late.num,
        "late_forecast_p50_ratio": late.p50,
        "late_forecast_p90_ratio": late.p90,
    }


def _of_ideal(run: Outcome) -> float:
    """Return the worst ratio of a minute to an ideal server's."""
    return min(own / best for own, best in zip(run.shares, run.ideal, strict=True) if best)


def tables(found: Mapping[Rate, Outcome]) -> str:
    """Return a table for people, with the first seed's minutes in per cent of all requests."""
    head = ["", "load", "worst minute", "mean", "ideal", "of ideal", "beside best effort",
            "its share min", "waiting", "refused", "forecast p50", "p90", "late p50", "p90",
            "minutes %"]  # fmt: skip
    keys = ("worst_minute_of_possible", "mean_minute_of_possible", "ideal_worst_minute",
            "worst_minute_of_ideal", "worst_minute_beside_best_effort", "best_effort_share_min",
            "max_waiting", "refused", "forecast_p50_ratio", "forecast_p90_ratio",
            "late_forecast_p50_ratio", "late_forecast_p90_ratio")  # fmt: skip
    rows = [head]
    for server, loads in figures(found).items():
        for load, entry in loads.items():
            runs = _of(found, server, float(load), beside=False)
            minutes = " ".join(f"{100 * each:.0f}" for each in runs[0].attained) if runs else ""
            cells = ["" if entry.get(key) is None else f"{entry[key]:g}" for key in keys]
            rows.append([server, load, *cells, minutes])
    return text_table(rows)
