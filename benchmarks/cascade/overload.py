"""Overload of the large engine, in virtual time: what a threshold that yields is worth.

The large engine gets twice what it can do for five minutes; requests have the measured scores and
losses of the tasks. Three routers: the large engine alone, a threshold that stays, and one that
moves between the two bounds by the large engine's predicted first token. The engines are
simulated, the routers are those of the gateway.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.cascade.judging import FIRST
from benchmarks.overload.serving import as_served
from paceline.bench.calibrate.fitting import Measured, fit, outcomes_of, scores_of
from paceline.routing.cascade import Easing, pick_threshold
from paceline.routing.cascade.router import CascadeRouter
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes

__all__ = ["overload"]

# a step of the large engine and of the small one, s; requests at once, and tokens of an answer
_STEPS: Final = (0.04, 0.01)
_PLACES, _OUTPUT = 2, 25
_CAPACITY: Final = _PLACES / ((_OUTPUT + 1) * _STEPS[0])
_SECONDS, _LOAD = 300.0, 2.0
_TTFT: Final = 2.0
_BOUNDS: Final = (0.05, 0.15)
_FULL_WAIT: Final = 1.0
_SPLITS: Final = 20


def _arrivals(seed: int, seconds: float) -> Iterator[Arrival]:
    draw, at = random.Random(seed), 0.0
    while (at := at + draw.expovariate(_LOAD * _CAPACITY)) < seconds:
        yield Arrival(at, 20, _OUTPUT, slo_class="chat", ttft=_TTFT)


def _run(
    score: Callable[[int], float], easing: Easing, arrivals: Iterator[Arrival]
) -> list[Served]:
    served: list[Served] = []
    config = as_served("deadline", max_num_seqs=_PLACES)
    specs = [ReplicaSpec(config, FixedStepTimes(step)) for step in reversed(_STEPS)]
    pool = Pool(specs, CascadeRouter(score, easing))
    Simulator(pool, served.append).run(arrivals)
    return served


def _played(
    score: Callable[[int], float],
    easing: Easing,
    lost: Sequence[float],
    arrivals: Iterator[Arrival],
) -> dict[str, float]:
    served = sorted(_run(score, easing, arrivals), key=lambda each: each.arrival.at)
    small = [each.replica == 0 for each in served]
    good = [each.ttft is not None and each.ttft <= _TTFT for each in served]
    loss = [lost[n % len(lost)] if is_small else 0.0 for n, is_small in enumerate(small)]
    return {
        "attainment": statistics.mean(good),
        "stays_small": statistics.mean(small),
        "loss_mean": statistics.mean(loss),
    }


def overload(
    rows: Sequence[Measured], seconds: float = _SECONDS, splits: int = _SPLITS
) -> dict[str, Any]:
    """Return attainment and mean loss of each router, over splits: a fifth of the labels fits the
    scorer, two fifths pick the thresholds, and the rest are the traffic."""
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in range(splits):
        order = random.Random(seed).sample(range(len(rows)), len(rows))
        fifth = len(rows) // 5
        fitting, held, new = (
            [rows[i] for i in part]
            for part in (order[:fifth], order[fifth : 3 * fifth], order[3 * fifth :])
        )
        scorer = fit(fitting, "route", FIRST)
        scores = scores_of(scorer, held, "route", FIRST).tolist()
        losses = outcomes_of(held).losses.tolist()
        strict, eased = (pick_threshold(scores, losses, most) for most in _BOUNDS)
        draws = scores_of(scorer, new, "route", FIRST).tolist()
        lost = outcomes_of(new).losses.tolist()
        for name, low, high in (
            ("large alone", 2.0, 2.0),
            ("threshold stays", strict, strict),
            ("load-aware", strict, eased),
        ):
            easing = Easing(low, high, _FULL_WAIT)
            score = partial(_nth, draws)
            runs.setdefault(name, []).append(_played(score, easing, lost, _arrivals(seed, seconds)))
    found: dict[str, Any] = {"bounds": list(_BOUNDS), "load": _LOAD, "seconds": seconds}
    for name, each in runs.items():
        found[name] = {key: round(statistics.mean(run[key] for run in each), 3) for key in each[0]}
    aware = found["load-aware"]["attainment"]
    for name in ("large alone", "threshold stays"):
        found[f"times {name}"] = round(aware / found[name]["attainment"], 2)
    errors = statistics.stdev(run["loss_mean"] for run in runs["load-aware"]) / splits**0.5
    found["loss_standard_error"] = round(errors, 4)
    return found


def _nth(draws: Sequence[float], number: int) -> float:
    return draws[number % len(draws)]
