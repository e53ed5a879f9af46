"""Loads that rise and fall, of equal requests: how soon a server recovers.

*Recovery*: two minutes at 1.5, then 0.9. The minute that begins half a minute after the step down
is compared with the same minute, of the same requests, with 0.9 before it too. *Steps*: a load for
each minute, up and down; each minute is judged by its own arrivals, as at constant rates.
*Bursts*: gaps of a coefficient of variation of 4, at 1.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any, Final, NamedTuple

from benchmarks.overload.judging import MINUTE, by_minute, ideal, of_possible
from benchmarks.overload.serving import (
    CAPACITY,
    CHAT,
    EQUAL,
    PLACES,
    SERVICE,
    STEP,
    as_served,
    chats,
    in_time,
    play,
    times,
)
from paceline.sim.report.table import text_table

__all__ = ["CHANGES", "Change", "Outcome", "change", "figures", "recovery", "table"]

Parts = tuple[tuple[float, float], ...]
BEFORE: Final = 2 * MINUTE
# seconds from the step down to the minute that is compared
RECOVERY: Final = 30.0
_STEPS: Final = (0.5, 2.0, 0.7, 1.5, 0.9, 3.0, 0.9, 1.2, 0.5, 2.0)
# seconds and loads in turn, and the coefficient of variation of gaps
CHANGES: Final[dict[str, tuple[Parts, float]]] = {
    "overload before": (((BEFORE, 1.5), (2 * MINUTE, 0.9)), 1.0),
    "none before": (((BEFORE, 0.9), (2 * MINUTE, 0.9)), 1.0),
    "steps": (tuple((MINUTE, load) for load in _STEPS), 1.0),
    "bursts": (((10 * MINUTE, 1.5),), 4.0),
}


class Change(NamedTuple):
    """One run."""

    name: str
    server: str
    seed: int


class Outcome(NamedTuple):
    """Results of a run."""

    # by the minute: share served in time, and ratio to an ideal server's share
    attained: list[float]
    of_ideal: list[float]
    # share of the possible requests, by the minute
    shares: list[float]
    # share in time of the minute that begins ``RECOVERY`` after the first change
    after: float
    most_waiting: int


def change(asked: Change) -> Outcome:
    """Serve all parts."""
    parts, cv = CHANGES[asked.name]
    end = sum(seconds for seconds, _ in parts)
    config = as_served(asked.server, max_num_seqs=PLACES)
    run = play(config, EQUAL, chats(times(parts, asked.seed, cv)), until=end + 5.0)
    moments = [arrival.at for arrival in run.arrivals]
    judged = list(zip(moments, map(in_time, run.outcomes), strict=True))
    assert CHAT.ttft is not None
    kept = ideal(moments, PLACES, SERVICE, CHAT.ttft - STEP)
    count = round(end / MINUTE)
    minutes = by_minute(judged, count)
    best = by_minute(zip(moments, kept, strict=True), count)
    (after,) = by_minute(judged, 1, begin=BEFORE + RECOVERY)
    return Outcome(
        [each.kept / max(1, each.came) for each in minutes],
        [each.kept / max(1, most.kept) for each, most in zip(minutes, best, strict=True)],
        of_possible(minutes, CAPACITY),
        after.kept / max(1, after.came),
        run.most_waiting,
    )


def recovery(found: Mapping[Change, Outcome]) -> dict[str, float]:
    """Return by server the ratio of the minute with the overload before it to that without, as a
    mean over seeds."""
    ratios: dict[str, list[float]] = {}
    for asked, outcome in found.items():
        if asked.name == "overload before":
            without = found[asked._replace(name="none before")]
            ratios.setdefault(asked.server, []).append(outcome.after / without.after)
    return {server: round(fmean(each), 3) for server, each in ratios.items()}


def figures(found: Mapping[Change, Outcome]) -> dict[str, dict[str, Any]]:
    """Return figures by server and change, over all seeds."""
    results: dict[str, dict[str, Any]] = {}
    for server, name in dict.fromkeys((asked.server, asked.name) for asked in found):
        runs = _runs(found, server, name)
        results.setdefault(server, {})[name] = {
            "worst_minute_of_ideal": round(min(min(each.of_ideal) for each in runs), 3),
            "worst_minute_of_possible": round(min(min(each.shares) for each in runs), 3),
            "max_waiting": max(each.most_waiting for each in runs),
        }
    return results


def _runs(found: Mapping[Change, Outcome], server: str, name: str) -> list[Outcome]:
    return [each for asked, each in found.items() if (asked.server, asked.name) == (server, name)]


def table(found: Mapping[Change, Outcome]) -> str:
    """Return a table for people; minutes are those of the first seed."""
    rows = [["", "", "worst of ideal", "of possible", "waiting", "minutes %", "of ideal %"]]
    for server, changes in figures(found).items():
        for name, entry in changes.items():
            first = _runs(found, server, name)[0]
            minutes = [
                " ".join(f"{100 * share:.0f}" for share in each)
                for each in (first.attained, first.of_ideal)
            ]
            rows.append([server, name, *map(str, entry.values()), *minutes])
    return text_table(rows)
