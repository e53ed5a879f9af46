"""Figures of a pair of models, from measured answers alone."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.cascade.tasks import truth
from paceline.bench.calibrate.asking import Answers
from paceline.bench.calibrate.checkers import quality, text_of
from paceline.bench.calibrate.curves import (
    Interval,
    Outcomes,
    apgr,
    auroc,
    calls_saved,
    interval,
    oracle,
)
from paceline.bench.calibrate.fitting import (
    MODES,
    Measured,
    fit,
    measured,
    out_of_fold,
    outcomes_of,
    scores_of,
)
from paceline.bench.calibrate.labels import Label
from paceline.gateway.settings.cascade import Mode
from paceline.routing.cascade import pick_threshold

__all__ = [
    "bound",
    "by_kind",
    "by_pair",
    "in_folds",
    "pair",
    "router_us",
    "scripted_large",
    "unseen",
]

FIRST: Final = 24
ALPHAS: Final = (0.02, 0.05, 0.1, 0.15)
_SPLITS: Final = 20
_CALIBRATION: Final = 200
_FIT: Final = 200
# share of its answers that the scripted large model gets wrong, by kind; others: _USUAL
_WRONG: Final = {"products": 0.12, "sorting": 0.1, "code": 0.1, "counting": 0.12, "json": 0.06}
_USUAL: Final = 0.04
# random choices that are averaged
_DRAWS: Final = 400
# tries of which the worst counts, for weaker large models
_TIMES_WRONG: Final = (1, 4, 8)


def scripted_large(labels: Sequence[Label], seed: int = 0, times: int = 1) -> list[str]:
    """Return the scripted large model's answers: the checker's, wrong by a rate per kind; with
    ``times`` as if it were wrong where one of so many tries is."""
    draw = random.Random(seed)
    rates = {kind: 1.0 - (1.0 - rate) ** times for kind, rate in {**_WRONG, "": _USUAL}.items()}
    return [
        "?" if draw.random() < rates.get(label.kind, rates[""]) else truth(label)
        for label in labels
    ]


def pair(
    labels: Sequence[Label], small: Answers, large: Sequence[str], drawn: Answers | None = None
) -> list[Measured]:
    """Return the labels with both qualities; ``drawn``: further answers of the small model."""
    rows = []
    for label, answer in zip(labels, large, strict=True):
        found = small.find("small", label)
        assert found is not None, "all were asked"
        more = None if drawn is None else drawn.find("small", label)
        qualities = quality(label, text_of(found)), quality(label, answer)
        row = measured(label, found, *qualities, samples=more)
        assert row is not None, "the server answers chats"
        rows.append(row)
    return rows


def by_kind(rows: Sequence[Measured]) -> dict[str, list[float]]:
    """Return the qualities of both models by kind."""
    kinds = sorted({row.label.kind for row in rows})
    return {
        kind: [
            round(statistics.mean(getattr(row, side) for row in rows if row.label.kind == kind), 2)
            for side in ("small", "large")
        ]
        for kind in kinds
    }


def _told(found: Interval) -> list[float]:
    return [round(value, 3) for value in (found.value, found.low, found.high)]


def in_folds(rows: Sequence[Measured], modes: Sequence[Mode] = MODES) -> dict[str, dict[str, Any]]:
    """Return AUROC, APGR and calls saved of each router and of the baselines; each score is by a
    scorer that was fitted on the other nine folds. A figure is [value, low, high]."""
    outcomes = outcomes_of(rows)
    scores = {mode: out_of_fold(rows, mode, FIRST) for mode in modes}
    scores["oracle"] = oracle(outcomes)  # type: ignore[index]
    # a judge of the small answers that is never wrong, and knows nothing of the large ones
    scores["small known"] = outcomes.small  # type: ignore[index]
    scores["longest first"] = np.array([-float(len(r.prompt.text)) for r in rows])  # type: ignore[index]
    good = [row.is_good for row in rows]
    found: dict[str, dict[str, Any]] = {}
    for name, each in scores.items():
        found[name] = {
            "auroc": round(auroc(good, each), 3),
            "apgr": _told(interval(apgr, outcomes, each)),
            "calls_saved_at_95": _told(
                interval(lambda o, s: calls_saved(o, s, 0.95), outcomes, each)
            ),
            "calls_saved_at_99": _told(
                interval(lambda o, s: calls_saved(o, s, 0.99), outcomes, each)
            ),
        }
    return found


def _by_chance(figure: Callable[[Outcomes, Any], float], outcomes: Outcomes) -> list[float]:
    """Return a figure of a random choice: its mean over draws, and the middle 95 % of them."""
    draw, count = np.random.default_rng(0), len(outcomes.small)
    found = [figure(outcomes, draw.random(count)) for _ in range(_DRAWS)]
    return [round(float(each), 3) for each in (np.mean(found), *np.quantile(found, (0.025, 0.975)))]


def _share(outcomes: Outcomes, scores: Any) -> float:
    """Return the area above that of a random choice, as a share of what knowing the small answers
    has; ``scores``: a column of each."""
    area, most = (apgr(outcomes, column) - 0.5 for column in scores.T)
    return area / most if most > 0.0 else math.nan


def by_pair(rows: Sequence[Measured], large: str = "") -> dict[str, dict[str, Any]]:
    """Return the figures of the same small answers next to other large models, by their names: the
    real one, if ``large`` names it, and scripted ones that are wrong as often as now, and as the
    worst of 4 and of 8 tries: a weaker one is weakest in hard kinds. A figure is [value, low,
    high]."""
    pairs = {large: list(rows)} if large else {}
    for times in _TIMES_WRONG:
        answers = scripted_large([row.label for row in rows], times=times)
        pairs[f"scripted, worst of {times}"] = [
            msgspec.structs.replace(row, large=quality(row.label, answer))
            for row, answer in zip(rows, answers, strict=True)
        ]
    return {name: _of_pair(each) for name, each in pairs.items()}


def _of_pair(rows: Sequence[Measured]) -> dict[str, Any]:
    saved, outcomes = partial(calls_saved, share=0.95), outcomes_of(rows)
    scores: dict[str, Any] = {"oracle": oracle(outcomes), "small known": outcomes.small}
    scores |= {mode: out_of_fold(rows, mode, FIRST) for mode in MODES[:2]}
    qualities = float(outcomes.small.mean()), float(outcomes.large.mean())
    known = outcomes.small
    return {
        "quality": [round(each, 3) for each in qualities],
        "difference": round(qualities[1] - qualities[0], 3),
        "apgr": {name: _told(interval(apgr, outcomes, s)) for name, s in scores.items()}
        | {"random": _by_chance(apgr, outcomes)},
        "share_of_known": {
            mode: _told(interval(_share, outcomes, np.stack((scores[mode], known), axis=1)))
            for mode in MODES[:2]
        },
        "calls_saved_at_95": {
            name: _told(interval(saved, outcomes, s)) for name, s in scores.items()
        }
        | {"random": _by_chance(saved, outcomes)},
    }


def bound(rows: Sequence[Measured]) -> dict[str, Any]:
    """Return the loss on labels that neither the fit nor the threshold has seen, over 20 splits of
    200 labels to fit, 200 to calibrate and the rest."""
    losses: dict[float, list[float]] = {alpha: [] for alpha in ALPHAS}
    kept: dict[float, list[float]] = {alpha: [] for alpha in ALPHAS}
    for seed in range(_SPLITS):
        order = np.random.default_rng(seed).permutation(len(rows))
        ends = (_FIT, _FIT + _CALIBRATION)
        fitting, held, test = ([rows[i] for i in part] for part in np.split(order, ends))
        scorer = fit(fitting, "cascade", FIRST)
        known, new = (scores_of(scorer, part, "cascade", FIRST) for part in (held, test))
        for alpha in ALPHAS:
            threshold = pick_threshold(known.tolist(), outcomes_of(held).losses.tolist(), alpha)
            stays = (new >= threshold) & (new > 0.0)
            losses[alpha].append(float((outcomes_of(test).losses * stays).mean()))
            kept[alpha].append(float(stays.mean()))
    errors = [statistics.stdev(losses[a]) / math.sqrt(_SPLITS) for a in ALPHAS]
    means = [statistics.mean(losses[a]) for a in ALPHAS]
    return {
        "alpha": list(ALPHAS),
        "loss_mean": [round(mean, 4) for mean in means],
        "standard_error": [round(error, 4) for error in errors],
        "holds": [m <= a + 2 * e for m, a, e in zip(means, ALPHAS, errors, strict=True)],
        "stays_small": [round(statistics.mean(kept[a]), 3) for a in ALPHAS],
    }


def unseen(rows: Sequence[Measured], held: Sequence[Measured]) -> dict[str, Any]:
    """Return the figures on kinds that were never fitted or calibrated on: there the bound is not
    promised, as these labels are not exchangeable with the others."""
    order = np.random.default_rng(0).permutation(len(rows))
    fitting, known = ([rows[i] for i in part] for part in np.split(order, [len(rows) // 2]))
    outcomes, good = outcomes_of(held), [row.is_good for row in held]
    found: dict[str, Any] = {}
    for mode in MODES:
        scorer = fit(fitting, mode, FIRST)
        scores = scores_of(scorer, held, mode, FIRST)
        losses = outcomes_of(known).losses.tolist()
        threshold = pick_threshold(scores_of(scorer, known, mode, FIRST).tolist(), losses, 0.1)
        found[mode] = {
            "auroc": round(auroc(good, scores), 3),
            "apgr": _told(interval(apgr, outcomes, scores)),
            "loss_at_0.1": round(float((outcomes.losses * (scores >= threshold)).mean()), 4),
            "stays_small": round(float((scores >= threshold).mean()), 3),
        }
    return found


def router_us(rows: Sequence[Measured]) -> float:
    """Return the microseconds of a decision, the median over the prompts: features of the prompt
    and of the answer's tokens, and the score. Of five turns the least counts, as the machine's
    other work comes in bursts that are longer than one."""
    scorer, medians = fit(rows, "cascade", FIRST), []
    for _ in range(5):
        seconds = []
        for row in rows:
            # without what is known of the prompt
            fresh = msgspec.structs.replace(row, prompt=msgspec.structs.replace(row.prompt))
            began = time.perf_counter()
            fresh.fault("cascade", FIRST)
            scorer.score(fresh.features("cascade", FIRST))
            seconds.append(time.perf_counter() - began)
        medians.append(statistics.median(seconds))
    return round(1e6 * min(medians), 1)
