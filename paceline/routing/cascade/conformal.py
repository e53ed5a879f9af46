"""Thresholds by conformal risk control (Angelopoulos et al., "Conformal Risk Control").

A loss between 0 and 1 that never grows with the threshold has, at the threshold picked here, an
expectation of at most ``max_loss`` on a new request, whatever the scores are worth: bad scores only
send more to the large model. That holds where new requests are exchangeable with the labels, and
not for a kind of request that the labels lack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.errors import ConfigError

__all__ = ["TooFewLabelsError", "labels_missing", "pick_threshold"]


class TooFewLabelsError(ConfigError):
    """A bound needs more labels than there are."""


def labels_missing(count: int, max_loss: float) -> int:
    """Return the labels that a bound lacks: it needs 1 / max_loss - 1, of any outcome."""
    # without the rounding error of 1 / 0.05
    return max(0, math.ceil(1.0 / max_loss - 1.0 - 1e-9) - count)


def pick_threshold(scores: Sequence[float], losses: Sequence[float], max_loss: float) -> float:
    """Return the least threshold with n / (n + 1) * R + 1 / (n + 1) <= max_loss, where R is the
    mean loss of the labels whose scores reach it; infinite: none of the scores is enough.

    Args:
        scores: of each label; they must not have been fitted on these labels.
        losses: what is lost, 0 to 1, where the small answer is taken.

    Raises:
        TooFewLabelsError: even a threshold that takes no small answer cannot be shown to be enough.
    """
    count = len(scores)
    if missing := labels_missing(count, max_loss):
        raise TooFewLabelsError(
            f"max_loss {max_loss:g} needs {count + missing} labels, and there are {count}: "
            f"{missing} are missing"
        )
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    ranked = np.asarray(scores, np.float64)[order]
    lost = np.cumsum(np.asarray(losses, np.float64)[order])
    # equal scores are taken together
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    good = ends[lost[ends] + 1.0 <= max_loss * (count + 1) + 1e-9]
    return float(ranked[good[-1]]) if len(good) else math.inf
