"""One request's drafts, and how often similar ones were right lately.

A draft token is judged whether it was verified or not: once the real tokens are known, the drafts
at their positions are compared with them. So a request whose drafts are not worth verifying is
noticed when they become so, without spending a step. All sources draft every time, and the one with
the most expected tokens is taken; tokens that a grammar forces are certain.

Draft tokens are similar if they have the same source and match length, and those after a right one
are counted apart: they are right far more often than the first.

This module does not know steps, prices, or where draft tokens come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import eq, mul
from typing import Final

from paceline.core.drafter import NO_DRAFT, Drafter, DraftTokens
from paceline.core.outputs import DRAFT_MODEL
from paceline.speculation.draft_tokens import GRAMMAR, UNMADE

__all__ = ["Acceptance", "DraftState"]

# prior probability that a draft token is right, and its weight in observations
_PRIOR: Final = 0.6
_PRIOR_TRIES: Final = 4.0
# counts of one request, and of all, are halved beyond this number of tries
_MOST_TRIES: Final = 32.0
_MOST_TRIES_OF_ALL: Final = 256.0
# longer matches are counted with this length
_MOST_MATCH: Final = 8
# weight of the newest token in the share drafted right, of one request and of all
_NEWEST: Final = 1 / 16
_NEWEST_OF_ALL: Final = 1 / 128
# expected tokens of other drafts above which the draft model is not asked
_MADE: Final = 1.0
# share of tokens drafted right that is assumed until any is known
_FIRST_SHARE: Final = 0.5


class Acceptance:
    """How often draft tokens were right if all before them were; counts fade.

    Args:
        others: counts of all requests, for use until this one has enough; None: these are those.
        apart: these are of all requests with another model, and the others do not learn from them.
    """

    def __init__(self, others: Acceptance | None = None, *, apart: bool = False) -> None:
        many = others is None or apart
        self._most_tries = _MOST_TRIES_OF_ALL if many else _MOST_TRIES
        self._newest = _NEWEST_OF_ALL if many else _NEWEST
        # those that it begins with, and those that it tells
        self._prior, self._others = others, None if apart else others
        # recent share of positions with drafts whose first draft token was right
        self.share: float = _FIRST_SHARE if others is None else others.share
        # hits and tries by source and match length, of first draft tokens and of later ones
        self._counts: dict[tuple[str, int, bool], tuple[float, float]] = {}

    def rate(self, source: str, match: int, first: bool) -> float:
        """Return the estimated probability, above 0 and below 1."""
        prior = _PRIOR if self._prior is None else self._prior.rate(source, match, first)
        hits, tries = self._counts.get((source, min(match, _MOST_MATCH), first), (0.0, 0.0))
        return (hits + prior * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)

    def note(self, source: str, match: int, first: bool, *rights: bool) -> None:
        """Count draft tokens of a kind as right or wrong, in order."""
        kind = source, min(match, _MOST_MATCH), first
        hits, tries = self._counts.get(kind, (0.0, 0.0))
        for right in rights:
            fade = 0.5 if tries >= self._most_tries else 1.0
            hits, tries = (hits + right) * fade, (tries + 1.0) * fade
        self._counts[kind] = hits, tries
        if self._others is not None:
            self._others.note(source, match, first, *rights)

    def note_place(self, hit: bool) -> None:
        """Count a new token; ``hit``: the first draft token at its position was right."""
        self.share += (hit - self.share) * self._newest
        if self._others is not None:
            self._others.note_place(hit)

    def survivals(self, draft: DraftTokens) -> list[float]:
        """Return each draft token's probability of being right together with those before it."""
        token_ids, match, source = draft
        if not token_ids or source == GRAMMAR:
            return [1.0] * len(token_ids)
        first, later = self.rate(source, match, True), self.rate(source, match, False)
        return list(accumulate(repeat(later, len(token_ids) - 1), mul, initial=first))


class DraftState:
    """Drafts of one request; made when it might first get some.

    Args:
        others: acceptance over all requests with the same adapter.
    """

    def __init__(
        self, drafters: Sequence[Drafter], prompt: Sequence[int], others: Acceptance
    ) -> None:
        self._drafters = drafters
        self._tokens = list(prompt)
        # the last drafts of all drafters, the position where they start, and the chosen one
        self._proposed: list[DraftTokens] = []
        self._from = 0
        self._chosen = NO_DRAFT
        # tokens that the grammar forces, and the position where they start
        self._forced: Sequence[int] = ()
        self._forced_from = 0
        # known tokens that the backend's draft model has read or will skip, as far as it reported
        self._seen = 0
        self.acceptance = Acceptance(others)

    def force(self, start: int, token_ids: Sequence[int]) -> None:
        """Set the tokens that the grammar forces from position ``start`` on."""
        self._forced_from, self._forced = start, token_ids

    @property
    def num_unseen(self) -> int:
        """Known tokens that the backend's draft model reads before it drafts."""
        return max(0, len(self._tokens) - self._seen)

    def learn(self, token_ids: Sequence[int], behind: int, busy: bool) -> None:
        """Take in the chosen tokens of the backend's draft model, and how many known tokens it
        still has to read. No tokens count as a wrong one, unless the model was ``busy`` reading."""
        self._chosen = DraftTokens(token_ids, 0, DRAFT_MODEL)
        self._proposed = [d for d in self._proposed if d.source != DRAFT_MODEL] + [self._chosen]
        self._seen = len(self._tokens) - behind
        if not token_ids and not busy:
            self.acceptance.note(DRAFT_MODEL, 0, True, False)

    def propose(self, num_prompt: int, output: Sequence[int], count: int) -> DraftTokens:
        """Learn from the new known tokens, and draft up to ``count`` tokens that follow them.

        Args:
            num_prompt: tokens before the first of ``output``.
        """
        tokens = self._tokens
        new = output[len(tokens) - num_prompt :]
        tokens += new
        if new and self._from:
            self._judge()
        if new or not self._chosen.token_ids:
            self._ask_drafters(count)
        token_ids, match, source = chosen = self._chosen
        return chosen if len(token_ids) <= count else DraftTokens(token_ids[:count], match, source)

    def _ask_drafters(self, count: int) -> None:
        tokens = self._tokens
        self._from = len(tokens)
        drafts = (drafter.propose(tokens, count) for drafter in self._drafters)
        proposed = [draft for draft in drafts if draft.token_ids]
        passed = len(tokens) - self._forced_from
        if 0 <= passed < len(self._forced):
            forced = self._forced[passed : passed + count]
            # drafts that the grammar forbids are dropped, however long they are
            proposed = [draft for draft in proposed if all(map(eq, draft.token_ids, forced))]
            proposed.append(DraftTokens(forced, 0, GRAMMAR))
        worth, self._proposed = self._worth if len(proposed) > 1 else len, proposed
        self._chosen = max(proposed, key=worth, default=NO_DRAFT)

    def _worth(self, draft: DraftTokens) -> float:
        """Return the expected tokens; the draft model's are capped, as they cost time."""
        worth = sum(self.acceptance.survivals(draft))
        return min(worth, _MADE) if draft.source == DRAFT_MODEL else worth

    def _judge(self) -> None:
        known = self._tokens[self._from :]
        for token_ids, match, source in self._proposed:
            if not token_ids or token_ids[0] == UNMADE:
                continue
            rights = list(map(eq, token_ids, known))
            # drafts after a wrong one were made for another text
            del rights[[*rights, False].index(False) + 1 :]
            self.acceptance.note(source, match, True, rights[0])
            if len(rights) > 1:
                self.acceptance.note(source, match, False, *rights[1:])
        chosen = self._chosen.token_ids
        self.acceptance.note_place(len(chosen) > 0 and chosen[0] == known[0])
