"""Looking ahead: will memory last, and when would a new request see its first token?

This module does not decide; ``scheduler`` and ``admission`` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.request import Request
from paceline.core.step_time import StepShape, StepTimeModel
from paceline.core.work import WorkEstimator

__all__ = ["FirstTokenForecast", "future_peak"]


def future_peak(sequences: Iterable[tuple[int, int]]) -> int:
    """Most tokens held at once if every sequence grows by one token a step until it ends.

    ``sequences`` are (tokens held now, tokens still to come). Memory peaks just before one of them
    ends; with the longest-lived first, the first i + 1 are alive when number i ends (LightLLM's
    Past-Future scheduler, ASPLOS'25, arXiv 2507.10150).
    """
    peak = held = 0
    longest_first = sorted(((to_come, now) for now, to_come in sequences), reverse=True)
    for alive, (to_come, now) in enumerate(longest_first, 1):
        held += now
        peak = max(peak, to_come * alive + held)
    return peak


class FirstTokenForecast:
    """Predicts the time to first token of a request that would be queued now.

    What it waits for is computed prompt tokens ahead of it, and a slot and blocks that running
    requests give back when they end. The ratio of what came to what was said is learned, so a bias
    of the model corrects itself.
    """

    def __init__(self, step_time: StepTimeModel, work: WorkEstimator) -> None:
        self._step_time = step_time
        self._work = work
        self._bias = 1.0

    def seconds(
        self,
        request: Request,
        *,
        tokens_ahead: int,
        requests_ahead: int,
        running: Sequence[Request],
        free_slots: int,
        tokens_per_step: int,
    ) -> float | None:
        """Seconds from now to the first token; None while nothing was measured.

        Args:
            tokens_ahead: prompt tokens of running and waiting requests to be computed before.
            requests_ahead: waiting requests that will be admitted before.
            free_slots: requests that could run beside those running, for slots and memory.
            tokens_per_step: prompt tokens a step takes beside the running rows.
        """
        if not self._step_time.ready:
            return None
        narrow = [r.num_computed_tokens for r in running if r.num_uncomputed_tokens <= 1]
        base = StepShape(0, 0.0, len(narrow), sum(narrow))
        idle_step = self._step_time.predict(base)
        full_step = self._step_time.predict(base.plus(0, max(2, tokens_per_step)))
        ahead = tokens_ahead / tokens_per_step * full_step
        own = -(-request.num_prompt_tokens // tokens_per_step)
        rest = request.num_prompt_tokens - (own - 1) * tokens_per_step
        prompt = (own - 1) * full_step + self._step_time.predict(base.plus(0, max(2, rest)))
        wait = 0.0
        missing = requests_ahead + 1 - free_slots
        if missing > 0 and running:
            left = sorted(
                self._work.output_tokens(r) - (r.num_tokens - r.num_prompt_tokens) for r in running
            )
            # those that will run then end too: rounds of the same lengths
            rounds, index = divmod(missing - 1, len(left))
            mean = sum(left) / len(left)
            wait = (left[index] + rounds * mean) * max(idle_step, 1e-9)
        return self._bias * (max(ahead, wait) + prompt)

    def learn(self, predicted: float, actual: float) -> None:
        """Take in what became of a forecast."""
        if predicted > 0.0:
            # how far this forecast was off the present bias, bounded against outliers
            ratio = min(4.0, max(0.25, actual / predicted))
            self._bias = min(4.0, max(0.25, self._bias * (1.0 + 0.05 * (ratio - 1.0))))
