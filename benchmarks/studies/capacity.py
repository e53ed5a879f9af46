"""Rates that are served in time, in virtual time, and what no order of service could exceed.

The streams and the judgement of ``make bench-goodput`` (three classes; the requests in the middle
of a run) on a machine like the one whose figures docs/lab-log.md has: two cores that serve a 135M
model in int8, 4 ms a step, 0.39 ms a prompt token, 0.85 ms for a row of one token.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.common.load import TRACE, name_lengths, read_lengths
from benchmarks.goodput.curves import Curve, capacity
from benchmarks.goodput.loads import TARGETS, Load, Span, steady
from benchmarks.studies.ablation import BASELINE
from benchmarks.studies.common import Study
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.core.slo import Slo
from paceline.sim.arrival import Arrival, Served
from paceline.sim.replica import ReplicaConfig
from paceline.sim.report import text_table
from paceline.sim.simulator import Pool, Simulator

__all__ = ["STUDY"]

STEP: Final = 0.004
TOKEN: Final = 0.00039
ROW: Final = 0.00085
# coefficient of variation of gaps; rates
KINDS: Final[dict[str, tuple[float, tuple[float, ...]]]] = {
    "poisson": (1.0, (4, 5, 5.5, 6, 6.5, 7, 8, 12)),
    "bursty": (4.0, (0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 12)),
}
SEEDS: Final = (1, 2, 3, 4)
SPAN: Final = Span(30.0, 30.0, 30.0)
SLOS: Final = {
    name: Slo(ttft=ttft, tpot=tpot, deadline=deadline)
    for name, (ttft, tpot, deadline) in TARGETS.items()
}
# requests to take the mean of
SAMPLE: Final = 2000
# by name: fields of the scheduler's configuration, and whether requests say what they need
SERVERS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "everything on": ({"policy": "deadline", "background_share": 0.1}, True),
    "first come first served": (BASELINE | {"max_num_batched_tokens": 256}, False),
}


class _Steps:
    """See the module."""

    def another(self, seed: int) -> _Steps:
        return self

    def seconds(self, plan: SchedulerOutput) -> float:
        narrow = sum(num_tokens == 1 for _, _, num_tokens, _, _ in plan.rows)
        return STEP + TOKEN * (plan.num_tokens - narrow) + ROW * narrow


def _arrival(load: Load, named: bool) -> Arrival:
    if not named:
        return Arrival(load.at, len(load.prompt), load.output)
    slo = SLOS[load.slo_class]
    return Arrival(
        load.at,
        len(load.prompt),
        load.output,
        slo_class=load.slo_class,
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


def _within(name: str, rate: float, cv: float, seed: int) -> list[bool]:
    """Of each judged request, whether it was served in time."""
    options, named = SERVERS[name]
    config = ReplicaConfig(
        scheduler=SchedulerConfig(**({"max_model_len": 4096} | options)),
        cache=CacheConfig(block_size=16, num_blocks=6000, enable_prefix_caching=False),
    )
    loads = steady(rate, cv, SPAN, 40_000, seed)
    arrivals = [_arrival(load, named) for load in loads]
    judged = {
        id(a): SLOS[load.slo_class] for a, load in zip(arrivals, loads, strict=True) if load.judged
    }
    answers: list[bool] = []

    def take(served: Served) -> None:
        if id(served.arrival) in judged:
            answers.append(_kept(served, judged[id(served.arrival)]))

    Simulator(Pool.single(config, _Steps()), take).run(arrivals)
    assert len(answers) == len(judged), "nobody is lost"
    return answers


def _rates(kind: str) -> str:
    """Per cent within targets by rate, and the highest rate with 90 % within."""
    cv, rates = KINDS[kind]
    head = ["", *(f"{rate:g}/s" for rate in rates), "90 % up to"]
    rows = [head]
    for name in SERVERS:
        curve: Curve = {}
        for rate in rates:
            kept = [each for seed in SEEDS for each in _within(name, rate, cv, seed)]
            curve[rate] = {"attainment": sum(kept) / len(kept), "requests": len(kept)}
        shares = (f"{100 * run['attainment']:.0f}" for run in curve.values())
        rows.append([name, *shares, f"{capacity(curve):.2f}/s"])
    return text_table(rows)


def _bound() -> str:
    """What requests take of the machine, were steps free: all, and the smallest nine tenths, by
    request that comes."""
    lengths = read_lengths(TRACE, SAMPLE, 0)
    # the last piece of a prompt brings the first token
    seconds = sorted(TOKEN * prompt + ROW * (output - 1) for prompt, output in lengths)
    rows = [["lengths", "served", "ms for each that comes", "at most"]]
    for share in (1.0, 0.9):
        mean = sum(seconds[: int(share * SAMPLE)]) / SAMPLE
        rows.append(
            [name_lengths(TRACE), f"{100 * share:.0f} %", f"{1e3 * mean:.1f}", f"{1 / mean:.2f}/s"]
        )
    return text_table(rows)


def tables() -> dict[str, str]:
    """Requests a second, per cent, and milliseconds."""
    return {**{kind: _rates(kind) for kind in KINDS}, "bound": _bound()}


STUDY = Study("capacity", tables)
