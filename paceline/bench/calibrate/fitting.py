"""Fitting: from measured answers to scorers, and to the calibration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.bench.calibrate.curves import Outcomes
from paceline.bench.calibrate.labels import Label
from paceline.gateway.cascade.answer import Said, fault_of, features_of, read_said
from paceline.gateway.cascade.prompt import Prompt, read_prompt
from paceline.gateway.settings.calibration import Calibration, Fitted, Side
from paceline.gateway.settings.cascade import Mode
from paceline.routing.cascade import Features, Scorer, fit_scorer

__all__ = [
    "MODES",
    "Measured",
    "calibrate",
    "fit",
    "measured",
    "out_of_fold",
    "outcomes_of",
    "scores_of",
]

MODES: Final[tuple[Mode, ...]] = get_args(Mode)
# share of the labels that scorers are fitted on; thresholds are picked on the others
_FIT_SHARE: Final = 0.5
_PENALTY: Final = 1.0


class Measured(msgspec.Struct, frozen=True):
    """One label with both answers."""

    label: Label
    prompt: Prompt
    # answer of the small model
    said: Said
    small: float
    large: float

    @property
    def is_good(self) -> bool:
        """Return whether the small answer loses nothing."""
        return self.small >= self.large

    def fault(self, mode: Mode, first: int) -> str:
        """Return the fault that the gateway sees before it decides; empty: none."""
        return fault_of(self.said, mode, first)

    def features(self, mode: Mode, first: int) -> Features:
        return features_of(self.prompt, None if mode == "route" else self.said, mode, first)


def measured(
    label: Label, answer: Mapping[str, Any], small: float, large: float
) -> Measured | None:
    """Return a label with its figures; None: the small answer cannot be read."""
    prompt = read_prompt(label.as_read(), "")
    said = None if prompt is None else read_said(msgspec.json.encode(answer), prompt)
    if prompt is None or said is None:
        return None
    return Measured(label, prompt, said, small, large)


def outcomes_of(rows: Sequence[Measured]) -> Outcomes:
    return Outcomes(
        np.array([row.small for row in rows], np.float64),
        np.array([row.large for row in rows], np.float64),
    )


def fit(rows: Sequence[Measured], mode: Mode, first: int) -> Scorer:
    """Fit a scorer; answers with an exact fault never reach one."""
    judged = [row for row in rows if not row.fault(mode, first)] or rows
    return fit_scorer(
        [row.features(mode, first) for row in judged], [row.is_good for row in judged], _PENALTY
    )


def scores_of(
    scorer: Scorer, rows: Sequence[Measured], mode: Mode, first: int
) -> NDArray[np.float64]:
    """Return the scores as the gateway decides: 0 for an answer with an exact fault."""
    return np.array(
        [0.0 if row.fault(mode, first) else scorer.score(row.features(mode, first)) for row in rows]
    )


def out_of_fold(
    rows: Sequence[Measured], mode: Mode, first: int, folds: int = 10, seed: int = 0
) -> NDArray[np.float64]:
    """Return each label's score by a scorer that was fitted without it."""
    order = np.random.default_rng(seed).permutation(len(rows))
    scores = np.zeros(len(rows))
    for part in np.array_split(order, min(folds, len(rows))):
        others = [rows[i] for i in np.setdiff1d(order, part)]
        scorer = fit(others, mode, first)
        scores[part] = scores_of(scorer, [rows[i] for i in part], mode, first)
    return scores


def calibrate(
    rows: Sequence[Measured],
    small: Side,
    large: Side,
    first: int,
    seed: int = 0,
    labels: Literal["checked", "shadow"] = "checked",
) -> Calibration:
    """Fit scorers on one part of the labels, and score the others for the thresholds; ``labels``:
    what told which answers are good."""
    order = np.random.default_rng(seed).permutation(len(rows))
    split = max(1, int(len(rows) * _FIT_SHARE))
    fitting, held = ([rows[i] for i in part] for part in (order[:split], order[split:]))
    # a model that tells log-probabilities of some answers alone is scored by its prompts
    modes = MODES if all(row.said.tokens for row in rows if row.said.answer.text) else MODES[:1]
    losses = outcomes_of(held).losses.tolist()
    found: dict[Mode, Fitted] = {}
    for mode in modes:
        scorer = fit(fitting, mode, first)
        scores = scores_of(scorer, held, mode, first)
        found[mode] = Fitted(scorer.to_bytes(), scores.tolist(), losses)
    return Calibration(
        small=small,
        large=large,
        prefix_tokens=first,
        num_labels=len(rows),
        fitted=found,
        labels=labels,
    )
