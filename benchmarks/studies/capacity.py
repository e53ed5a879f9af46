"""Rates that are served in time, in virtual time, and a bound on any order of service.

The streams and the judgement of ``make bench NAME=goodput`` (three classes; the requests in the
middle of a run) on two cores that serve a 135M model.

The bound, and the machine, are in ``benchmarks/studies/bound.py``. Runs last a minute and a half;
the mixes of ``make bench NAME=overload`` have the same classes on the same machine, beyond capacity
for ten minutes and by the minute.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks.common.load import TRACE, name_lengths, read_lengths
from benchmarks.goodput.curves import Curve, capacity
from benchmarks.goodput.loads import TARGETS, Load, Span, steady, stream
from benchmarks.studies.ablation import BASELINE
from benchmarks.studies.bound import ROW, STEP, TOKEN, Asked, Steps, own_seconds, share_in_time
from benchmarks.studies.common import Study
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.core.slo import Slo
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Pool
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report.table import text_table
from paceline.sim.simulator import Simulator

__all__ = ["STUDY"]

# coefficient of variation of gaps, and rates
KINDS: Final[dict[str, tuple[float, tuple[float, ...]]]] = {
    "poisson": (1.0, (4, 5, 5.5, 6, 6.5, 7, 8, 12)),
    "bursty": (4.0, (0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 12)),
}
SEEDS: Final = (1, 2, 3, 4)
# seconds of the streams for the bound
LONG: Final = 240.0
SPAN: Final = Span(30.0, 30.0, 30.0)
SLOS: Final = {
    name: Slo(slo_class=name, ttft=ttft, tpot=tpot, deadline=deadline)
    for name, (ttft, tpot, deadline) in TARGETS.items()
}
# number of requests for the mean
SAMPLE: Final = 2000
# by name: fields of the scheduler's configuration, and whether requests have their targets
SERVERS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "everything on": ({"policy": "deadline"}, True),
    "deadline order, fixed budget": (
        BASELINE | {"policy": "deadline", "max_num_batched_tokens": 256},
        True,
    ),
    "first come first served": (BASELINE | {"max_num_batched_tokens": 256}, False),
}
# targets of a chat, and by what its callers ask: fields of the configuration, and their targets
CHAT: Final = Slo(ttft=1.0, tpot=0.1)
ASKING: Final[dict[str, tuple[dict[str, Any], Slo]]] = {
    "for nothing, and no default": ({}, Slo()),
    "for nothing": ({"default_ttft_s": CHAT.ttft, "default_tpot_s": CHAT.tpot}, Slo()),
    "for 1 s and 100 ms": ({"default_ttft_s": CHAT.ttft, "default_tpot_s": CHAT.tpot}, CHAT),
}
ASKED: Final = ((1.0, 4.0), (1.0, 5.0), (1.0, 6.0), (4.0, 3.0), (4.0, 5.0))


def _arrival(load: Load, slo: Slo | None) -> Arrival:
    if slo is None:
        return Arrival(load.at, len(load.prompt), load.output)
    return Arrival(
        load.at,
        len(load.prompt),
        load.output,
        slo_class=slo.slo_class,
        ttft=slo.ttft,
        tpot=slo.tpot,
        deadline=slo.deadline,
    )


def _kept(served: Served, slo: Slo) -> bool:
    if served.first_token is None or served.last_token is None:
        return False
    return not slo.violations(
        served.arrival.at, served.first_token, served.last_token, served.output_tokens
    )


def _play(
    loads: Sequence[Load],
    options: dict[str, Any],
    slos: Sequence[Slo | None],
    watch: Callable[[int, SchedulerOutput, float, float, float], None] | None = None,
) -> list[Served]:
    """Serve a stream; return outcomes in its order. ``watch`` gets every plan and its times."""
    config = ReplicaConfig(
        scheduler=SchedulerConfig(**({"max_model_len": 4096} | options)),
        cache=CacheConfig(block_size=16, num_blocks=6000, enable_prefix_caching=False),
    )
    arrivals = [_arrival(load, slo) for load, slo in zip(loads, slos, strict=True)]
    found: dict[int, Served] = {}

    def take(served: Served) -> None:
        found[id(served.arrival)] = served

    Simulator(Pool.single(config, Steps()), take, on_plan=watch).run(arrivals)
    return [found[id(arrival)] for arrival in arrivals]


def _within(name: str, rate: float, cv: float, seed: int) -> list[bool]:
    """Return whether each judged request was served in time."""
    options, named = SERVERS[name]
    loads = steady(rate, cv, SPAN, 40_000, seed)
    slos = [SLOS[load.slo_class] for load in loads]
    served = _play(loads, options, slos if named else [None] * len(loads))
    return [
        _kept(each, slo) for each, slo, load in zip(served, slos, loads, strict=True) if load.judged
    ]


def _clairvoyant(loads: Sequence[Load], seconds: float) -> float:
    """Return the bound on the share in time, in any order, if the stream is repeated on end."""
    stream = [Asked(load.at, len(load.prompt), load.output, SLOS[load.slo_class]) for load in loads]
    return share_in_time(stream, seconds)


def _rates(kind: str) -> str:
    """Return per cent within targets by rate, and the highest rate with 90 % within."""
    cv, rates = KINDS[kind]
    head = ["", *(f"{rate:g}/s" for rate in rates), "90 % up to"]
    rows = [head]
    for name in SERVERS:
        curve: Curve = {}
        for rate in rates:
            kept = [each for seed in SEEDS for each in _within(name, rate, cv, seed)]
            curve[rate] = {"attainment": sum(kept) / len(kept), "requests": len(kept)}
        rows.append(_row(name, curve))
    best: Curve = {}
    for rate in rates:
        streams = [stream(rate, cv, LONG, 40_000, seed) for seed in SEEDS[:2]]
        share = statistics.mean(_clairvoyant(loads, LONG) for loads in streams)
        best[rate] = {"attainment": share, "requests": sum(map(len, streams))}
    return text_table([*rows, _row("no order serves more", best)])


def _row(name: str, curve: Curve) -> list[str]:
    shares = (f"{100 * run['attainment']:.0f}" for run in curve.values())
    return [name, *shares, f"{capacity(curve):.2f}/s"]


def _account(rate: float) -> str:
    """Return the use of time while requests arrive, in per cent; with everything on."""
    options, _ = SERVERS["everything on"]
    kinds = ("work in time", "work too late", "fixed part of steps", "idle")
    rows = [[f"{rate:g}/s", *kinds, "too late: interactive", "standard", "batch"]]
    for kind, (cv, _) in KINDS.items():
        spent: defaultdict[str, float] = defaultdict(float)
        for seed in SEEDS:
            loads = stream(rate, cv, LONG, 40_000, seed)
            slos = [SLOS[load.slo_class] for load in loads]
            work: defaultdict[int, float] = defaultdict(float)
            steps: list[float] = []

            def watch(
                _: int,
                plan: SchedulerOutput,
                made: float,
                start: float,
                end: float,
                work: defaultdict[int, float] = work,
                steps: list[float] = steps,
            ) -> None:
                if end > LONG:
                    return
                steps.append(end - start)
                for row in plan.rows:
                    work[int(row.request_id.split("/")[0])] += own_seconds(row.num_tokens)

            served = _play(loads, options, slos, watch)
            for number, seconds in work.items():
                kept = _kept(served[number], slos[number])
                spent["in time" if kept else slos[number].slo_class] += seconds
            spent["fixed"] += STEP * len(steps)
            spent["idle"] += LONG - sum(steps)
        shares = {name: 100 * seconds / LONG / len(SEEDS) for name, seconds in spent.items()}
        late = [shares.get(name, 0.0) for name in SLOS]
        cells = (shares["in time"], sum(late), shares["fixed"], shares["idle"], *late)
        rows.append([kind, *(f"{cell:.1f}" for cell in cells)])
    return text_table(rows)


def _defaults() -> str:
    """Return per cent of judged requests with the first token within 1 s and 100 ms a token, where
    all have the same targets."""
    head = ["asks", *(f"{rate:g}/s, cv {cv:g}" for cv, rate in ASKED)]
    rows = [head]
    for name, (options, slo) in ASKING.items():
        shares = []
        for cv, rate in ASKED:
            kept = []
            for seed in SEEDS:
                loads = steady(rate, cv, SPAN, 40_000, seed)
                served = _play(loads, {"policy": "deadline"} | options, [slo] * len(loads))
                kept += [
                    _kept(e, CHAT) for e, load in zip(served, loads, strict=True) if load.judged
                ]
            shares.append(f"{100 * sum(kept) / len(kept):.1f}")
        rows.append([name, *shares])
    return text_table(rows)


def _bound() -> str:
    """Return the seconds of all requests, and of the smallest nine tenths, per arrival, if steps
    had no fixed part."""
    lengths = read_lengths(TRACE, SAMPLE, 0)
    # the last chunk of a prompt gives the first token
    seconds = sorted(TOKEN * prompt + ROW * (output - 1) for prompt, output in lengths)
    rows = [["lengths", "served", "ms for each that comes", "at most"]]
    for share in (1.0, 0.9):
        mean = sum(seconds[: int(share * SAMPLE)]) / SAMPLE
        rows.append(
            [name_lengths(TRACE), f"{100 * share:.0f} %", f"{1e3 * mean:.1f}", f"{1 / mean:.2f}/s"]
        )
    return text_table(rows)


def _at_once() -> str:
    """Return tokens a second, and seconds, without targets and all at once."""
    rows = [["at once", "default", "tokens/s", "E2E mean s", "last first token s"]]
    for count in (64, 256):
        for name in ("for nothing, and no default", "for nothing"):
            figures = []
            for seed in SEEDS:
                drawn = stream(count / 50.0, 1.0, 60.0, 40_000, seed)[:count]
                loads = [replace(load, at=0.0) for load in drawn]
                options = {"policy": "deadline"} | ASKING[name][0]
                served = _play(loads, options, [Slo()] * len(loads))
                ends = [each.last_token or 0.0 for each in served]
                tokens = sum(each.output_tokens for each in served)
                begun = max(each.first_token or 0.0 for each in served)
                figures.append((tokens / max(ends), statistics.mean(ends), begun))
            means = [statistics.mean(column) for column in zip(*figures, strict=True)]
            default = "none" if "no default" in name else "1 s, 100 ms"
            rows.append([str(count), default, *(f"{mean:.1f}" for mean in means)])
    return text_table(rows)


def tables() -> dict[str, str]:
    """Return tables of requests a second, per cent, and milliseconds."""
    return {
        **{kind: _rates(kind) for kind in KINDS},
        "bound": _bound(),
        "account": _account(7.0),
        "defaults": _defaults(),
        "at-once": _at_once(),
    }


STUDY = Study("capacity", tables)
