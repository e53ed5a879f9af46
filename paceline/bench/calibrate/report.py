"""Report of a calibration: lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from paceline.bench.calibrate.curves import (
    apgr,
    auroc,
    calls_saved,
    curve,
    interval,
    oracle,
)
from paceline.bench.calibrate.fitting import Measured, out_of_fold, outcomes_of
from paceline.gateway.settings.calibration import Calibration
from paceline.routing.cascade import labels_missing, pick_threshold

__all__ = ["report"]

_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_LOSSES: Final = (0.02, 0.05, 0.1, 0.15)


def report(rows: Sequence[Measured], made: Calibration, max_loss: float) -> Iterator[str]:
    """Yield what was measured; scores are those of scorers that were fitted without the label."""
    outcomes = outcomes_of(rows)
    small, large = outcomes.small.mean(), outcomes.large.mean()
    best = "large" if large >= small else "small"
    yield (
        f"{len(rows)} labels: quality {small:.3f} of the small model, {large:.3f} of the large "
        f"one; best single: the {best} one"
    )
    draw = np.random.default_rng(0)
    scores = {
        "oracle": oracle(outcomes),
        "random": draw.random(len(rows)),
        "longest first": np.array([-float(len(row.prompt.text)) for row in rows]),
    }
    for mode in made.fitted:
        scores[mode] = out_of_fold(rows, mode, made.prefix_tokens)
    yield ""
    yield "quality by the share that is handed to the large model:"
    yield f"{'':14}" + "".join(f"{share:8.0%}" for share in _SHARES)
    for name, each in scores.items():
        line = curve(outcomes, each)
        # a random choice is a straight line in expectation
        told = (
            small + share * (large - small) if name == "random" else line[round(share * len(rows))]
            for share in _SHARES
        )
        yield f"{name:14}" + "".join(f"{value:8.3f}" for value in told)
    yield ""
    yield "area between the models (APGR; 0.5 is random), calls saved at 95 % of the large quality:"
    for name, each in scores.items():
        if name != "random":
            gap = interval(apgr, outcomes, each)
            saved = interval(lambda o, s: calls_saved(o, s, 0.95), outcomes, each)
            yield f"{name:14}{gap}, {saved}"
    good = [row.is_good for row in rows]
    for mode in made.fitted:
        area = auroc(good, scores[mode])
        yield f"{mode}: a good answer scores higher than a bad one at {area:.1%}"
    yield ""
    yield "what a bound on the loss leaves to the small model:"
    for mode, fitted in made.fitted.items():
        for most in sorted({*_LOSSES, max_loss}):
            if missing := labels_missing(len(fitted.scores), most):
                yield f"{mode:10} max_loss {most:<6g} {missing} labels are missing"
                continue
            threshold = pick_threshold(fitted.scores, fitted.losses, most)
            share = float((np.array(fitted.scores) >= threshold).mean())
            yield f"{mode:10} max_loss {most:<6g} threshold {threshold:.3f}, {share:.1%}"
