"""What one more row of a step costs, learned from steps without prompts.

Up to some number of rows a step waits for the weights, and a row more costs next to nothing;
beyond, each costs what computing it takes. So seconds are fitted with a knee::

    seconds = a + b * max(0, rows - knee)

which is what a guess is weighed against. ``predict.step_time`` has one price for all rows, as it is
made for steps that are full.

This module does not know requests, or what is in a row.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RowPrice"]

# numbers of rows up to which another may cost nothing, as far as they are tried
_KNEES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24)
# weight of the newest step among those of as many rows, once there are some
_NEWEST: Final = 0.1
# steps of as many rows count for no more than this
_MOST_WEIGHT: Final = 16.0
# steps that were seen between two fits, which are made when a price is asked for
_REFIT: Final = 16
# rows of a step that teaches something at most: few steps with guesses have more, and those of
# hundreds of requests would decide the line
_MOST_ROWS: Final = 48
# numbers of rows that must have been seen
_DIFFERENT: Final = 3
# mean of squared relative errors by which a higher knee must be better
_BETTER: Final = 1e-5


class RowPrice:
    """Fed with steps; ``of`` is None until enough of them were different."""

    def __init__(self) -> None:
        # rows -> mean seconds, and how many steps that is of
        self._seen: dict[int, tuple[float, float]] = {}
        # steps since the last fit
        self._num_new = 0
        # seconds up to the knee, that, and the price
        self._fitted: tuple[float, int, float] | None = None

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if num_rows > _MOST_ROWS:
            return
        mean, weight = self._seen.get(num_rows, (seconds, 0.0))
        share = max(_NEWEST, 1.0 / (weight + 1.0))
        self._seen[num_rows] = mean + share * (seconds - mean), min(_MOST_WEIGHT, weight + 1.0)
        self._num_new += 1

    def of(self, num_rows: int) -> tuple[float, float] | None:
        """Seconds of a step of so many rows, and those that one more row adds; None: not known
        yet."""
        if self._num_new >= _REFIT and len(self._seen) >= _DIFFERENT:
            self._num_new, self._fitted = 0, self._fit()
        if self._fitted is None:
            return None
        seconds, knee, price = self._fitted
        return seconds + price * max(0, num_rows - knee), price if num_rows >= knee else 0.0

    def _fit(self) -> tuple[float, int, float]:
        """The line with the least squares of relative errors, of those that do not fall."""
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
            # of about equals the lower knee: no row is taken for free without need
            if error < best - enough:
                best, found = error, (middle - slope * centre, knee, slope)
        return found
