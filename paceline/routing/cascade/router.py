"""Cascade for the simulator: engine 0 has the small model, the others the large one.

A request is handed off by its prompt's score, at the threshold that the gateway would have at the
same wait: the same ``Easing`` over the same views of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.routing.cascade.easing import Easing
from paceline.routing.engine_load import Demand, EngineView
from paceline.routing.predicted import PredictedRouter

__all__ = ["CascadeRouter"]


class CascadeRouter(PredictedRouter):
    """Router of a cascade in mode ``route``.

    Args:
        score: returns the score of a request's prompt, by the request's number.
    """

    def __init__(
        self, score: Callable[[int], float], easing: Easing, *, staleness: float = 0.25
    ) -> None:
        super().__init__(staleness=staleness)
        self._score, self._easing = score, easing

    def pick(self, number: int, views: Sequence[EngineView], demand: Demand) -> int:
        threshold = self._easing.threshold(min(view.ttft for view in views[1:]))
        if self._score(number) >= threshold:
            return 0
        return 1 + super().pick(number, views[1:], demand)
