"""How many guesses of each row of one step are worth verifying.

They are taken by falling likelihood, so first guesses of a row come before later ones, for as long
as one brings more tokens in its time than the step does without it. Requests for whose pace a plain
step takes too long come first, and get some until they are expected to keep it. Those that keep
theirs do not lose it to guesses: a row of several tokens may take several times as long as one.

The backend's draft model makes the first guess of all its rows in one pass, then the second of
those that want one, and so on. A pass is paid by the guesses made in it, each as it is likely; in a
pass that is made anyway one more costs nothing.

This module does not know what is guessed, or by whom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple, TypeAlias

from paceline.core.request import Request

__all__ = ["DraftChoice", "StepCosts", "Survivals", "likeliest_first"]

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
# by row, how likely each of its guesses is to be right, those before it too
Survivals: TypeAlias = Sequence[Sequence[float]]


def likeliest_first(survivals: Survivals, anyhow: Container[int]) -> list[tuple[float, int]]:
    """(-likelihood, row) of guesses that may be worth it, and of all of the rows in ``anyhow``."""
    found = [
        (-each, index)
        for index, row in enumerate(survivals)
        for each in row
        if each >= _UNLIKELY or index in anyhow
    ]
    return sorted(found)


class StepCosts(NamedTuple):
    """What is known of a step's time, in seconds."""

    # of the step without guesses; 0: nothing is known
    seconds: float
    # nearly all steps take less than so many times what is predicted
    late: float
    # of a step of so many rows, and those that one more adds
    price: Callable[[int], tuple[float, float]]
    # of a pass of the draft model
    making: float
    # by row whose guesses that model makes, those in which it takes in what it has not seen, spread
    # over the tokens that are to come
    catching_up: Mapping[int, float]
    # well enough to go by it
    known: bool


class DraftChoice:
    """Made anew for each step.

    Args:
        requests: of its rows, which have one token each.
        most: guesses at most.
        tries: one guess that likely, or one of the draft model, is taken whatever it is thought to
            cost.
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
        # where one request runs alone, no other pays for what it gains
        self._margin = 1.0 + _MARGIN * (len(requests) - 1)
        # seconds for each token of the rows whose requests aim at a mean time between tokens
        self._paces: dict[int, float] = {}
        # seconds of a step after which one of the requests has too long a gap
        self._longest = math.inf
        for index, request in enumerate(requests):
            targets = request.targets
            if targets.tpot is not None:
                self._paces[index] = targets.tpot / late
            if targets.itl is not None:
                self._longest = min(self._longest, targets.itl / late)
        # rows that do not keep theirs by themselves
        self.behind = {index for index, pace in self._paces.items() if costs.seconds > pace}
        # guesses of each row, the tokens that each is expected to bring, and all together
        self.counts = [0] * len(requests)
        self._expected = [1.0] * len(requests)
        self.tokens = float(len(requests))

    def take(self, ranked: list[tuple[float, int]], survivals: Survivals) -> None:
        """Choose among guesses, of which ``ranked`` are the ``likeliest_first``."""
        costs, counts, closed = self._costs, self.counts, set[int]()
        # guesses so far, and the price after these
        num_taken, (now, each_row) = 0, costs.price(len(counts))
        # of each pass, how many of its guesses are expected to be right
        shares = [
            sum(each for each in made if each >= _UNLIKELY)
            for made in zip_longest(*map(survivals.__getitem__, costs.catching_up), fillvalue=0.0)
        ]
        if self.behind:
            ranked = sorted(ranked, key=lambda guess: guess[1] not in self.behind)
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
                # those behind it in the row are of no use without it
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
        """Whether no request that keeps its targets loses them."""
        seconds = self._seconds + each_row
        for row, pace in self._paces.items():
            expected = self._expected[row] + (survival if row == index else 0.0)
            if row not in self.behind and seconds > pace * expected:
                return False
        return seconds <= self._longest
