"""The number of draft tokens of each row of one step that are worth verifying.

They are taken by falling probability, so first drafts of a row come before later ones, while one
yields more tokens in its time than the step does without it. Requests whose pace a plain step is
too slow for come first, and get some until they are expected to keep it. Requests that keep theirs
do not lose it: a row of several tokens may take several times as long as one.

The backend's draft model makes the first draft token of all its rows in one pass, then the second
of those that want one, and so on. The cost of a pass is shared by its draft tokens by their
probability; one more in a pass that runs anyway costs nothing.

This module does not know draft tokens or their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple, TypeAlias

from paceline.core.request import Request

__all__ = ["DraftChoice", "StepCosts", "Survivals", "likeliest_first"]

# least probability of a draft token to verify while costs are unknown
_LIKELY: Final = 0.3
# least probability of a draft token to verify: below it, the gain may not cover costs other than
# the step's time
_UNLIKELY: Final = 0.1
# for each other running request, the gain of a draft token must exceed its time by this share: they
# pay for it, and some would be slower for little
_MARGIN: Final = 0.125
# most rows and draft tokens of a step while costs are unknown
_MOST_UNPRICED: Final = 16
# by row, the probability of each draft token to be right, with those before it
Survivals: TypeAlias = Sequence[Sequence[float]]


def likeliest_first(survivals: Survivals, anyhow: Container[int]) -> list[tuple[float, int]]:
    """Return (-probability, row) of drafts that may pay, and of all drafts of rows ``anyhow``."""
    found = [
        (-each, index)
        for index, row in enumerate(survivals)
        for each in row
        if each >= _UNLIKELY or index in anyhow
    ]
    return sorted(found)


class StepCosts(NamedTuple):
    """Estimated parts of a step's time, in seconds."""

    # the step without drafts; 0: unknown
    seconds: float
    # ratio to the predicted time that nearly all steps stay below
    late: float
    # seconds by number of rows: of a step with that many, and of one row more
    price: Callable[[int], tuple[float, float]]
    # a pass of the draft model
    making: float
    # by row drafted by that model, time to read the tokens it has not seen, spread over the
    # expected remaining tokens
    catching_up: Mapping[int, float]
    # whether the prices are known well enough to rely on them
    known: bool


class DraftChoice:
    """The choice for one step; a new object each time.

    Args:
        requests: the requests of its rows, which have one token each.
        most: most draft tokens.
        tries: take one probable draft token, or one of the draft model, whatever it is thought
            to cost.
    """

    def __init__(
        self, requests: Sequence[Request], costs: StepCosts, *, most: int, tries: bool
    ) -> None:
        late = costs.late
        self._costs = costs
        self._seconds = costs.seconds
        self._num_passes = 0
        self._most = most if costs.known else min(most, _MOST_UNPRICED - len(requests))
        self.tries = tries
        # a request that runs alone slows no other down
        self._margin = 1.0 + _MARGIN * (len(requests) - 1)
        # seconds per token of rows whose requests have a target for the mean time between tokens
        self._paces: dict[int, float] = {}
        # seconds of a step beyond which a request has too long a gap
        self._longest = math.inf
        for index, request in enumerate(requests):
            targets = request.targets
            if targets.tpot is not None:
                self._paces[index] = targets.tpot / late
            if targets.itl is not None:
                self._longest = min(self._longest, targets.itl / late)
        # rows that are too slow without drafts
        self.behind = {index for index, pace in self._paces.items() if costs.seconds > pace}
        # draft tokens of each row, the tokens expected of each row, and of all rows together
        self.counts = [0] * len(requests)
        self._expected = [1.0] * len(requests)
        self.tokens = float(len(requests))

    def take(self, ranked: list[tuple[float, int]], survivals: Survivals) -> None:
        """Choose among draft tokens, of which ``ranked`` are the ``likeliest_first``."""
        costs, counts, closed = self._costs, self.counts, set[int]()
        # draft tokens so far, and the prices after these
        num_taken, (now, each_row) = 0, costs.price(len(counts))
        # by pass, the number of its draft tokens that are expected to be right
        shares = [
            sum(each for each in made if each >= _UNLIKELY)
            for made in zip_longest(*map(survivals.__getitem__, costs.catching_up), fillvalue=0.0)
        ]
        if self.behind:
            ranked = sorted(ranked, key=lambda draft: draft[1] not in self.behind)
        for unlikely, index in ranked:
            if index in closed:
                continue
            survival, place, by_model = -unlikely, counts[index], index in costs.catching_up
            seconds = now + self._num_passes * costs.making
            making = costs.making if by_model and place >= self._num_passes else 0.0
            share = making * survival / max(survival, shares[place]) if making else 0.0
            share += costs.catching_up.get(index, 0.0) * (not place)
            if (
                num_taken >= self._most
                or (survival < _UNLIKELY and not self.tries)
                or not self._is_worth(survival, index, seconds, each_row + share)
                or not self._fits(survival, index, each_row + making)
            ):
                # later ones in the row are useless without it
                closed.add(index)
                continue
            self._seconds += each_row + making
            self._num_passes += making > 0.0
            self._expected[index] += survival
            counts[index] += 1
            self.tokens += survival
            num_taken += 1
            now, each_row = costs.price(len(counts) + num_taken)

    def _is_worth(self, survival: float, index: int, seconds: float, each_row: float) -> bool:
        worth = survival >= _LIKELY
        if self._costs.known:
            worth = survival * seconds > self.tokens * each_row * self._margin
        if worth or (
            index in self.behind and self._seconds > self._paces[index] * self._expected[index]
        ):
            return True
        tried = self.tries and (survival >= _LIKELY or index in self._costs.catching_up)
        self.tries = self.tries and not tried
        return tried

    def _fits(self, survival: float, index: int, each_row: float) -> bool:
        """Whether all requests that keep their targets still do."""
        seconds = self._seconds + each_row
        for row, pace in self._paces.items():
            expected = self._expected[row] + (survival if row == index else 0.0)
            if row not in self.behind and seconds > pace * expected:
                return False
        return seconds <= self._longest
