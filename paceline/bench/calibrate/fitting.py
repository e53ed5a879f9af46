"""Fitting: from measured answers to scorers, and to the calibration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.bench.calibrate.curves import Outcomes
from paceline.bench.calibrate.labels import Label
from paceline.gateway.cascade.answer import (
    Said,
    agreement_of,
    fault_of,
    features_of,
    read_said,
)
from paceline.gateway.cascade.prompt import Prompt, read_prompt
from paceline.gateway.cascade.signals import embedding_of
from paceline.gateway.settings.calibration import Calibration, Fitted, Side, Signals
from paceline.gateway.settings.cascade import Mode
from paceline.routing.cascade import (
    Features,
    Forest,
    Scorer,
    fit_forest,
    fit_scorer,
    has_forests,
)

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
_NO_SIGNALS: Final = Signals()


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
    label: Label,
    answer: Mapping[str, Any],
    small: float,
    large: float,
    *,
    samples: Mapping[str, Any] | None = None,
    embedding: Mapping[str, Any] | None = None,
    perplexity: bool = False,
) -> Measured | None:
    """Return a label with its figures; None: the small answer cannot be read.

    Args:
        samples: answer with further choices of the small model.
        embedding: answer with the vector of the prompt.
        perplexity: whether log-probabilities of the prompt count.
    """
    prompt = read_prompt(label.as_read(), "")
    said = None if prompt is None else read_said(msgspec.json.encode(answer), prompt)
    if prompt is None or said is None:
        return None
    said = said.scored_by(agreement=True, perplexity=perplexity)
    if samples is not None:
        share = agreement_of(msgspec.json.encode(samples), said, prompt)
        said = msgspec.structs.replace(said, agreement=share)
    if embedding is not None:
        found = embedding_of(msgspec.json.encode(embedding))
        prompt = msgspec.structs.replace(prompt, embedding=found)
    return Measured(label, prompt, said, small, large)


def outcomes_of(rows: Sequence[Measured]) -> Outcomes:
    return Outcomes(
        np.array([row.small for row in rows], np.float64),
        np.array([row.large for row in rows], np.float64),
    )


def fit(rows: Sequence[Measured], mode: Mode, first: int) -> Scorer | Forest:
    """Fit a scorer, a forest where scikit-learn is installed; answers with an exact fault never
    reach one."""
    judged = [row for row in rows if not row.fault(mode, first)] or rows
    samples = [row.features(mode, first) for row in judged]
    fitted = fit_forest if has_forests() else fit_scorer
    return fitted(samples, [row.is_good for row in judged], _PENALTY)


def scores_of(
    scorer: Scorer | Forest, rows: Sequence[Measured], mode: Mode, first: int
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
    signals: Signals = _NO_SIGNALS,
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
        forest = scorer.to_bytes() if isinstance(scorer, Forest) else b""
        linear = scorer.linear if isinstance(scorer, Forest) else scorer
        found[mode] = Fitted(linear.to_bytes(), scores.tolist(), losses, forest)
    return Calibration(
        small=small,
        large=large,
        prefix_tokens=first,
        num_labels=len(rows),
        fitted=found,
        labels=labels,
        signals=signals,
    )
