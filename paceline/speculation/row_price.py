"""The price of one more row of a step, learned from steps without prompts.

Up to some number of rows a step waits for the weights, and one more row costs almost nothing;
beyond, each costs its computing time. So seconds are fitted with a knee::

    seconds = a + b * max(0, rows - knee)

against which drafts are weighed. ``predict.step_time`` has one price for all rows, as it is made
for full steps.

This module does not know requests, or the contents of a row.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RowPrice"]

# candidates for the number of rows up to which one more is free
_KNEES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24)
# weight of the newest step in the mean of its number of rows, once there are some
_NEWEST: Final = 0.1
# largest weight of the steps with one number of rows
_MOST_WEIGHT: Final = 16.0
# new steps between two fits, which are made when a price is asked for
_REFIT: Final = 16
# most rows of a step to learn from: few steps with drafts have more, and steps of hundreds of
# requests would dominate the line
_MOST_ROWS: Final = 48
# different numbers of rows needed for a fit
_DIFFERENT: Final = 3
# mean of squared relative errors by which a higher knee must be better
_BETTER: Final = 1e-5


class RowPrice:
    """Learns from steps; ``of`` returns None until enough different ones were seen."""

    def __init__(self) -> None:
        # rows -> mean seconds, and the number of steps in that mean
        self._seen: dict[int, tuple[float, float]] = {}
        # steps since the last fit
        self._num_new = 0
        # seconds up to the knee, the knee, and the price of a row
        self._fitted: tuple[float, int, float] | None = None

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn that a step of ``num_rows`` rows took ``seconds``."""
        if num_rows > _MOST_ROWS:
            return
        mean, weight = self._seen.get(num_rows, (seconds, 0.0))
        share = max(_NEWEST, 1.0 / (weight + 1.0))
        self._seen[num_rows] = mean + share * (seconds - mean), min(_MOST_WEIGHT, weight + 1.0)
        self._num_new += 1

    def of(self, num_rows: int) -> tuple[float, float] | None:
        """Return the seconds of a step of ``num_rows`` rows, and of one row more; None: unknown
        yet."""
        if self._num_new >= _REFIT and len(self._seen) >= _DIFFERENT:
            self._num_new, self._fitted = 0, self._fit()
        if self._fitted is None:
            return None
        seconds, knee, price = self._fitted
        return seconds + price * max(0, num_rows - knee), price if num_rows >= knee else 0.0

    def _fit(self) -> tuple[float, int, float]:
        """Return the line with the least squared relative error, among those that do not fall."""
        best, found = float("inf"), (0.0, 1, 0.0)
        enough = _BETTER * sum(weight for _, weight in self._seen.values())
        points = [(rows, mean, weight / mean**2) for rows, (mean, weight) in self._seen.items()]
        total = sum(w for _, _, w in points)
        middle = sum(w * y for _, y, w in points) / total
        for knee in _KNEES:
            beyond = [(max(0, rows - knee), y, w) for rows, y, w in points]
            centre = sum(w * x for x, _, w in beyond) / total
            spread = sum(w * (x - centre) ** 2 for x, _, w in beyond)
            if not spread:
                break
            slope = max(0.0, sum(w * (x - centre) * (y - middle) for x, y, w in beyond) / spread)
            error = sum(w * (middle + slope * (x - centre) - y) ** 2 for x, y, w in beyond)
            # among near equals the lower knee: no row counts as free without evidence
            if error < best - enough:
                best, found = error, (middle - slope * centre, knee, slope)
        return found
