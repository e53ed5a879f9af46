"""Would one more make everybody's tokens late?

The TPOT guard of SCORPIO (arXiv 2505.23022), without its credits: requests are let in while a step
that computes one token for each of those running, and for the newcomer, is predicted to take no
longer than the tightest TPOT among them.

This module does not know the queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from paceline.core.request import Request
from paceline.core.step_time import StepShape, StepTimeModel

__all__ = ["pace_allows"]

# of the target, for steps that take longer than predicted
_SHARE: Final = 0.9


def pace_allows(request: Request, running: Iterable[Request], model: StepTimeModel) -> bool:
    """Whether ``request`` may join. Best-effort requests count on neither side: they are left out
    of a step that would be late."""
    if request.slo.best_effort or not model.ready:
        return True
    # a target that not even a row alone can meet is past caring for
    least = model.predict(StepShape(0, 0.0, 1, 0)) / _SHARE
    tightest = request.slo.tpot
    if tightest is not None and tightest < least:
        tightest = None
    rows = 0
    keys = request.num_tokens
    for other in running:
        slo = other.slo
        if slo.best_effort:
            continue
        rows += 1
        keys += other.num_computed_tokens
        if slo.tpot is not None and slo.tpot >= least and (tightest is None or slo.tpot < tightest):
            tightest = slo.tpot
    if tightest is None or rows == 0:
        return True
    return model.predict(StepShape(0, 0.0, rows + 1, keys)) <= _SHARE * tightest
