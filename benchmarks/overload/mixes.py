"""Mixes and bursts beyond capacity: the share of the bound served in time, which must not decay.

A minute of each mix is repeated on end, so every minute has the same work, and so has the bound
(``benchmarks/studies/bound.py``), which is for repeated streams. The machine is that module's too.
The first minute begins with an empty engine, and work that it puts off is done in the second. So
with any order of service it can be better than the others: by 0 to 15 %, which its own bound
shows. ``worst_of_first_minute`` compares shares of these two bounds; shares of the one bound are
``worst_of_first_minute_same_bound``, and the worst minute over the second is printed too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any, Final, NamedTuple

from benchmarks.overload.judging import MINUTE, Ratios, Shares, by_minute, ratios
from benchmarks.overload.serving import as_served, in_time, play
from benchmarks.studies.bound import Asked, Steps, own_seconds, share_in_time
from paceline.core.slo import Slo
from paceline.sim.arrival import Arrival
from paceline.sim.config import ReplicaConfig
from paceline.sim.report.table import text_table
from paceline.sim.workload.spec import open_workload

__all__ = [
    "MIXES",
    "Mix",
    "Mixed",
    "Outcome",
    "config_of",
    "figures",
    "minute_of",
    "mixed",
    "share",
    "stream_of",
    "table",
]

# means of 305 and 55 tokens; the machine serves six such requests a second
PROMPTS: Final = "lognormal(255,0.6)"
ANSWERS: Final = "lognormal(40,0.8)"
CHAT: Final = "ttft=1,tpot=100ms"
CLASSES: Final = f"interactive(1,{CHAT})+standard(1,ttft=3,tpot=150ms)+batch(1,deadline=30)"
# targets under ``deadline`` of a request that has none of its own
DEFAULT: Final = Slo(ttft=1.0, tpot=0.1)


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of every minute, and the server that they are sent to."""

    # requests a second
    rate: float
    classes: str
    policy: str = "deadline"
    # coefficient of variation of gaps
    cv: float = 1.0
    # tokens of prompts are drawn evenly on a logarithmic scale instead
    prompts: tuple[int, int] | None = None
    tenants: str = ""
    # the one tenant whose requests are judged, with a bound as if it were alone
    judged: str = ""
    # requests at once; None: as served
    places: int | None = None
    # an additional request, once a minute
    background: Arrival | None = None


# half a minute's work for one of eight slots
JOB: Final = Arrival(30.0, 500, 2000, slo_class="best-effort")
BESIDE: Final = f"chat(3,{CHAT})+best-effort(1)"
FLOOD: Final = Mix(13.5, f"chat(1,{CHAT})", policy="fair", tenants="flood(8)+light(1)")
MIXES: Final[dict[str, Mix]] = {
    "three classes": Mix(9.0, CLASSES),
    "three classes, bursts": Mix(8.0, CLASSES, cv=4.0),
    "chats, bursts": Mix(9.0, f"chat(1,{CHAT})", cv=4.0),
    "chats that ask for nothing": Mix(9.0, "standard(1)"),
    "prompts of 10 to 4,000": Mix(5.0, "chat(1,ttft=3,tpot=150ms)", prompts=(10, 4000)),
    "prompts of 10 to 4,000, three classes": Mix(5.0, CLASSES, prompts=(10, 4000)),
    "three priorities": Mix(
        9.0,
        f"a(1,{CHAT},priority=0)+b(1,{CHAT},priority=1)+c(1,{CHAT},priority=2)",
        policy="priority",
    ),
    "a flooding tenant": FLOOD,
    "a flooding tenant: the other's": replace(FLOOD, judged="light"),
    "aged background jobs": Mix(9.0, f"chat(1,{CHAT})", places=8, background=JOB),
    "beside best effort": Mix(16.0, BESIDE),
    "beside best effort, priority": Mix(16.0, BESIDE, policy="priority"),
    "beside best effort, fair": Mix(16.0, BESIDE, policy="fair"),
}


def stream_of(mix: Mix, seed: int, length: str) -> Iterator[Arrival]:
    """Yield the requests of a mix but for its background, as many as ``length`` says."""
    tenants = f",tenants={mix.tenants}" if mix.tenants else ""
    spec = f"synthetic:rate={mix.rate},cv={mix.cv},prompt={PROMPTS},output={ANSWERS},{length}"
    found = open_workload(f"{spec},classes={mix.classes}{tenants}", seed=seed)
    if mix.prompts is None:
        yield from found
        return
    rng, (low, high) = Random(f"{seed}/prompts"), map(math.log, mix.prompts)
    for each in found:
        yield replace(each, prompt_tokens=round(math.exp(rng.uniform(low, high))))


def minute_of(mix: Mix, seed: int) -> list[Arrival]:
    """Return the requests of a minute."""
    found = list(stream_of(mix, seed, "seconds=60"))
    if mix.background is not None:
        found.append(mix.background)
    return sorted(found, key=lambda arrival: arrival.at)


def config_of(mix: Mix) -> ReplicaConfig:
    """Return the configuration of the server."""
    return as_served(mix.policy, **({} if mix.places is None else {"max_num_seqs": mix.places}))


def _slo(arrival: Arrival) -> Slo | None:
    """Return the targets by which a request is judged; None if it is not judged."""
    if arrival.slo_class == "best-effort":
        return None
    if arrival.ttft is None and arrival.deadline is None:
        return DEFAULT
    return Slo(ttft=arrival.ttft, tpot=arrival.tpot, deadline=arrival.deadline)


class Mixed(NamedTuple):
    """One run."""

    mix: str
    seed: int
    minutes: int


class Outcome(NamedTuple):
    """Results of a run."""

    # share served in time, by the minute, and the bound on any order of service
    shares: list[float]
    bound: float
    # the same for the first minute, which begins with an empty engine and may end late
    first_bound: float
    most_waiting: int
    # predicted over actual times to first token of all served requests
    forecasts: list[float]
    # best effort's share in the worst ten seconds; None: it did not wait all the time
    best_effort: float | None


def mixed(asked: Mixed) -> Outcome:
    """Repeat the minute, and return the results."""
    mix = MIXES[asked.mix]
    minute = minute_of(mix, asked.seed)
    # one more, or no requests would follow those of the last
    arrivals = [
        replace(each, at=each.at + MINUTE * number)
        for number in range(asked.minutes + 1)
        for each in minute
    ]
    end = MINUTE * asked.minutes
    watch = Shares(arrivals, seconds_of=own_seconds) if "best-effort" in mix.classes else None
    run = play(config_of(mix), Steps(), arrivals, until=end + 30.0, watch=watch)
    judged = [
        (arrival.at, in_time(served, slo))
        for arrival, served in zip(run.arrivals, run.outcomes, strict=True)
        if (slo := _slo(arrival)) is not None and mix.judged in ("", arrival.tenant)
    ]
    stream = [
        Asked(each.at, each.prompt_tokens, each.output_tokens, slo)
        for each in minute
        if (slo := _slo(each)) is not None and mix.judged in ("", each.tenant)
    ]
    return Outcome(
        [each.kept / each.came for each in by_minute(judged, asked.minutes)],
        share_in_time(stream, MINUTE),
        share_in_time(stream, math.inf),
        run.most_waiting,
        ratios(run.outcomes, lambda served: True),
        None if watch is None else watch.least(20.0, end),
    )


def figures(found: Mapping[Mixed, Outcome]) -> dict[str, dict[str, Any]]:
    """Return figures by mix, over all seeds."""
    results: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(asked.mix for asked in found):
        runs = [outcome for asked, outcome in found.items() if asked.mix == name]
        shares = _by_minute(runs)
        kept = [run.best_effort for run in runs if run.best_effort is not None]
        told = Ratios.of([ratio for run in runs for ratio in run.forecasts])
        results[name] = {
            "worst_of_first_minute": round(min(shares[1:]) / _first(runs), 3),
            "worst_of_first_minute_same_bound": round(min(shares[1:]) / shares[0], 3),
            "worst_of_second_minute": round(min(shares[1:]) / shares[1], 3) if shares[1] else 0.0,
            "of_bound": round(fmean(shares), 3),
            "bound": round(fmean(run.bound for run in runs), 3),
            "max_waiting": max(run.most_waiting for run in runs),
            "forecast_p50_ratio": told.p50,
            "forecast_p90_ratio": told.p90,
            **({"best_effort_share_min": round(min(kept), 4)} if kept else {}),
        }
    return results


def _by_minute(runs: Sequence[Outcome]) -> list[float]:
    """Return each minute's share of the bound, as the mean of all runs."""
    of_bound = [[share / run.bound for share in run.shares] for run in runs]
    return [fmean(minute) for minute in zip(*of_bound, strict=True)]


def _first(runs: Sequence[Outcome]) -> float:
    """Return the first minute's share of its own bound, as the mean of all runs."""
    return fmean(run.shares[0] / run.first_bound for run in runs)


def share(found: Mapping[Mixed, Outcome]) -> float | None:
    """Return best effort's share in the worst ten seconds of all runs."""
    return min(
        (each.best_effort for each in found.values() if each.best_effort is not None), default=None
    )


def table(found: Mapping[Mixed, Outcome]) -> str:
    """Return a table for people."""
    head = ["", "worst of first minute", "same bound", "of second", "of bound", "bound", "waiting",
            "forecast p50", "p90", "best effort min", "minutes, % of bound"]  # fmt: skip
    rows = [head]
    for name, entry in figures(found).items():
        shares = _by_minute([outcome for asked, outcome in found.items() if asked.mix == name])
        minutes = " ".join(f"{100 * each:.0f}" for each in shares)
        keys = ("worst_of_first_minute", "worst_of_first_minute_same_bound",
                "worst_of_second_minute", "of_bound", "bound",
                "max_waiting", "forecast_p50_ratio", "forecast_p90_ratio",
                "best_effort_share_min")  # fmt: skip
        rows.append([name, *(str(entry.get(key, "")) for key in keys), minutes])
    return text_table(rows)
