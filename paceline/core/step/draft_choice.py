"""How many guesses of each row of one step are worth verifying.

They are taken by falling likelihood, so first guesses of a row come before later ones, for as long
as one brings more tokens in its time than the step does without it. Requests for whose pace a plain
step takes too long come first, and get some until they are expected to keep it. Those that keep
theirs do not lose it to guesses: a row of several tokens may take several times as long as one.

This module does not know what is guessed, or by whom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.request import Request

__all__ = ["DraftChoice", "StepCosts"]

# a guess is verified from so likely on, while it is not known what it costs
_LIKELY: Final = 0.3
# a guess that is less likely is never verified: what little it brings may not cover what it costs
# besides the step's time
_UNLIKELY: Final = 0.1
# for each other request that runs, what a guess brings must be worth so much more than its time:
# they pay for it, and some would be slower for little
_MARGIN: Final = 0.125
# rows and guesses of a step at most while it is not known what they cost
_MOST_UNPRICED: Final = 16


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What is known of a step's time."""

    # of the step without guesses; 0: nothing is known
    seconds: float
    # nearly all steps take less than so many times what is predicted
    late: float
    # seconds of a step of so many rows, and those that one more adds
    price: Callable[[int], tuple[float, float]]
    # by row, those that it takes to make one more of its guesses
    making: Sequence[float]
    # well enough to go by it
    known: bool


class DraftChoice:
    """Made anew for each step.

    Args:
        requests: of its rows, which have one token each.
        most: guesses at most.
        tries: one guess that likely is taken whatever it is thought to cost.
    """

    def __init__(
        self, requests: Sequence[Request], costs: StepCosts, *, most: int, tries: bool
    ) -> None:
        late = costs.late
        self._costs = costs
        self._seconds = costs.seconds
        self._making = 0.0
        self._most = most if costs.known else min(most, _MOST_UNPRICED - len(requests))
        self._tries = tries
        # of one request alone nobody else pays for what is gained
        self._margin = 1.0 + _MARGIN * (len(requests) - 1)
        # seconds for each token of the rows whose requests aim at a mean time between tokens
        self._paces = {
            index: request.targets.tpot / late
            for index, request in enumerate(requests)
            if request.targets.tpot is not None
        }
        # rows that do not keep theirs by themselves
        self.behind = {index for index, pace in self._paces.items() if costs.seconds > pace}
        # seconds of a step after which one of the requests has too long a gap
        gaps = [request.targets.itl for request in requests]
        self._longest = min([gap / late for gap in gaps if gap is not None], default=math.inf)
        # guesses of each row, the tokens that each is expected to bring, and all together
        self.counts = [0] * len(requests)
        self._expected = [1.0] * len(requests)
        self.tokens = float(len(requests))

    def take(self, likely: Sequence[tuple[float, int]]) -> None:
        """Choose among guesses, given as how likely each is right, those before it too, and its
        row; likeliest first."""
        closed: set[int] = set()
        for survival, index in sorted(likely, key=lambda entry: entry[1] not in self.behind):
            if index in closed:
                continue
            now, each_row = self._costs.price(len(self.counts) + sum(self.counts))
            now, each_row = now + self._making, each_row + self._costs.making[index]
            if (
                (survival < _UNLIKELY and not (self._tries and self._costs.making[index]))
                or sum(self.counts) >= self._most
                or not self._is_worth(survival, index, now, each_row)
                or not self._fits(survival, index, each_row)
            ):
                # those behind it in the row are of no use without it
                closed.add(index)
                continue
            self._seconds += each_row
            self._making += self._costs.making[index]
            self._expected[index] += survival
            self.counts[index] += 1
            self.tokens += survival

    def _is_worth(self, survival: float, index: int, seconds: float, each_row: float) -> bool:
        worth = survival >= _LIKELY
        if self._costs.known:
            worth = survival * seconds > self.tokens * each_row * self._margin
        if worth or (
            index in self.behind and self._seconds > self._paces[index] * self._expected[index]
        ):
            return True
        tries, self._tries = self._tries, False
        return tries and (survival >= _LIKELY or self._costs.making[index] > 0.0)

    def _fits(self, survival: float, index: int, each_row: float) -> bool:
        """Whether nobody who keeps a target loses it."""
        seconds = self._seconds + each_row
        return seconds <= self._longest and all(
            seconds <= pace * (self._expected[row] + (survival if row == index else 0.0))
            for row, pace in self._paces.items()
            if row not in self.behind
        )
