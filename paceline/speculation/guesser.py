"""One request's guesses, and how often those like them were right lately.

A guess is judged whether it was verified or not: once the tokens are known, those that were guessed
for their places are compared with them. So a request whose guesses are not worth verifying is found
out when they become so, without a step being spent on it. All sources guess every time, and the one
is taken from which most is expected; what a grammar leaves no choice about is certain.

Guesses are alike that are of the same source and follow as long a match, and those behind a right
one are counted apart: they are right far more often than the first.

This module does not know steps, prices, or where guesses come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import eq, mul
from typing import Final

from paceline.core.outputs import DRAFT_MODEL
from paceline.speculation.guess import GRAMMAR, NO_GUESS, UNMADE, Drafter, Guess

__all__ = ["Acceptance", "Guesser"]

# a guess is taken to be right so often, as if that had been seen so many times
_PRIOR: Final = 0.6
_PRIOR_TRIES: Final = 4.0
# counts of one request, and of all, are halved beyond so many tries
_MOST_TRIES: Final = 32.0
_MOST_TRIES_OF_ALL: Final = 256.0
# matches are told apart up to this length
_MOST_MATCH: Final = 8
# weight of the newest token in the share that was guessed, of one request and of all
_NEWEST: Final = 1 / 16
_NEWEST_OF_ALL: Final = 1 / 128
# tokens that other guesses must bring for the draft model not to be asked
_MADE: Final = 1.0
# so much of a text is taken to be guessed until any is known
_FIRST_SHARE: Final = 0.5


class Acceptance:
    """How often guesses were right, all before them being right; counts fade.

    Args:
        others: of all requests, for what is known before this one has seen much; None: this is it.
    """

    def __init__(self, others: Acceptance | None = None) -> None:
        self._most_tries = _MOST_TRIES_OF_ALL if others is None else _MOST_TRIES
        self._others = others
        # of late, this share of the places guessed for had a first guess that was right
        self.share: float = _FIRST_SHARE if others is None else others.share
        # hits and tries by source and match length, of first guesses and of later ones
        self._counts: dict[tuple[str, int, bool], tuple[float, float]] = {}

    def rate(self, source: str, match: int, first: bool) -> float:
        """Above 0 and below 1."""
        prior = _PRIOR if self._others is None else self._others.rate(source, match, first)
        hits, tries = self._counts.get((source, min(match, _MOST_MATCH), first), (0.0, 0.0))
        return (hits + prior * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)

    def note(self, source: str, match: int, first: bool, *rights: bool) -> None:
        """Guesses of a kind were right or not, in order."""
        kind = source, min(match, _MOST_MATCH), first
        hits, tries = self._counts.get(kind, (0.0, 0.0))
        for right in rights:
            fade = 0.5 if tries >= self._most_tries else 1.0
            hits, tries = (hits + right) * fade, (tries + 1.0) * fade
        self._counts[kind] = hits, tries
        if self._others is not None:
            self._others.note(source, match, first, *rights)

    def note_place(self, hit: bool) -> None:
        """A token has come; ``hit``: it was the first that was guessed for its place."""
        newest = _NEWEST_OF_ALL if self._others is None else _NEWEST
        self.share += (hit - self.share) * newest
        if self._others is not None:
            self._others.note_place(hit)

    def survivals(self, guess: Guess) -> list[float]:
        """How likely each of the guessed tokens is to be right, those before it too."""
        token_ids, match, source = guess
        if not token_ids or source == GRAMMAR:
            return [1.0] * len(token_ids)
        first, later = self.rate(source, match, True), self.rate(source, match, False)
        return list(accumulate(repeat(later, len(token_ids) - 1), mul, initial=first))


class Guesser:
    """Made when a request might first be given guesses.

    Args:
        others: of all requests.
    """

    def __init__(
        self, drafters: Sequence[Drafter], prompt: Sequence[int], others: Acceptance
    ) -> None:
        self._drafters = drafters
        self._tokens = list(prompt)
        # what all drafters guessed last, from which position on, and what was taken of it
        self._guesses: list[Guess] = []
        self._from = 0
        self._chosen = NO_GUESS
        # what the grammar leaves no choice about, from which position on
        self._forced: Sequence[int] = ()
        self._forced_from = 0
        # known tokens that the backend's draft model has seen or never will, as far as it said
        self._seen = 0
        self.acceptance = Acceptance(others)

    def force(self, start: int, token_ids: Sequence[int]) -> None:
        """The grammar allows nothing but these from position ``start`` on."""
        self._forced_from, self._forced = start, token_ids

    @property
    def num_unseen(self) -> int:
        """Known tokens that the backend's draft model takes in before it guesses."""
        return max(0, len(self._tokens) - self._seen)

    def learn(self, token_ids: Sequence[int], behind: int, busy: bool) -> None:
        """What the backend's draft model has guessed where it was chosen, and how many known tokens
        it has to take in yet. Unless it was ``busy`` with such, none is as good as a wrong one."""
        self._chosen = Guess(token_ids, 0, DRAFT_MODEL)
        self._guesses = [g for g in self._guesses if g.source != DRAFT_MODEL] + [self._chosen]
        self._seen = len(self._tokens) - behind
        if not token_ids and not busy:
            self.acceptance.note(DRAFT_MODEL, 0, True, False)

    def guess(self, num_prompt: int, output: Sequence[int], count: int) -> Guess:
        """Learn from what has become known, and guess up to ``count`` tokens that follow it.

        Args:
            num_prompt: tokens before the first of ``output``.
        """
        tokens = self._tokens
        new = output[len(tokens) - num_prompt :]
        tokens += new
        if new and self._from:
            self._judge()
        if new or not self._chosen.token_ids:
            self._propose(count)
        token_ids, match, source = chosen = self._chosen
        return chosen if len(token_ids) <= count else Guess(token_ids[:count], match, source)

    def _propose(self, count: int) -> None:
        tokens = self._tokens
        self._from = len(tokens)
        guesses = [g for d in self._drafters if (g := d.propose(tokens, count)).token_ids]
        passed = len(tokens) - self._forced_from
        if 0 <= passed < len(self._forced):
            forced = self._forced[passed : passed + count]
            # what the grammar forbids is no guess, however long it is
            guesses = [guess for guess in guesses if all(map(eq, guess.token_ids, forced))]
            guesses.append(Guess(forced, 0, GRAMMAR))
        worth, self._guesses = self._worth if len(guesses) > 1 else len, guesses
        self._chosen = max(guesses, key=worth, default=NO_GUESS)

    def _worth(self, guess: Guess) -> float:
        """Tokens that it is expected to bring; the draft model's count for less: they cost time."""
        worth = sum(self.acceptance.survivals(guess))
        return min(worth, _MADE) if guess.source == DRAFT_MODEL else worth

    def _judge(self) -> None:
        known = self._tokens[self._from :]
        for token_ids, match, source in self._guesses:
            if not token_ids or token_ids[0] == UNMADE:
                continue
            rights = list(map(eq, token_ids, known))
            # those behind a wrong one were guessed for another text
            del rights[[*rights, False].index(False) + 1 :]
            self.acceptance.note(source, match, True, rights[0])
            if len(rights) > 1:
                self.acceptance.note(source, match, False, *rights[1:])
        chosen = self._chosen.token_ids
        self.acceptance.note_place(len(chosen) > 0 and chosen[0] == known[0])
