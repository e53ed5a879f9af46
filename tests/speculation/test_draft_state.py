"""Drafts are judged whether they were verified or not, each kind by itself."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.backends.reference.null import expected_tokens
from paceline.core.drafter import DraftTokens
from paceline.core.outputs import DRAFT_MODEL
from paceline.engine.testing import ScriptedDrafter
from paceline.speculation.draft_state import Acceptance, DraftState
from paceline.speculation.draft_tokens import GRAMMAR, NGRAM, PREDICTION, UNMADE, ModelDrafter

VOCAB = 97
PROMPT = (3, 5, 8, 13)


def _scripted(prompt: Sequence[int], wrong: Sequence[int] = (), extra: int = 0) -> ScriptedDrafter:
    return ScriptedDrafter([*prompt, *expected_tokens(prompt, 200, VOCAB)], VOCAB, wrong, extra)


def test_drafts_that_become_right_are_verified_again() -> None:
    # five wrong ones make a request stop; right ones are seen without being verified
    knows = _scripted(PROMPT, wrong=(0,))
    state = DraftState([knows], PROMPT, Acceptance())
    answer = expected_tokens(PROMPT, 60, VOCAB)

    def likely(after: int) -> float:
        return state.acceptance.survivals(state.propose(len(PROMPT), answer[:after], 4))[0]

    low = [likely(length) for length in range(1, 10)][-1]
    knows.wrong = ()
    high = [likely(length) for length in range(10, 40)][-1]
    assert low < 0.3 < 0.6 < high < 1.0
    # what others saw counts for one that has seen nothing
    other = DraftState([knows], PROMPT, Acceptance(state.acceptance))
    assert other.acceptance.survivals(other.propose(len(PROMPT), (), 1))[0] > 0.6


def test_the_source_is_taken_of_which_most_is_expected() -> None:
    class Says:
        def __init__(self, source: str, right: bool) -> None:
            self.source, self.right = source, right

        def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
            return DraftTokens([7 if self.right else 8] * count, 1, self.source)

    state = DraftState([Says(NGRAM, False), Says(PREDICTION, True)], (1,), Acceptance())
    sources = [state.propose(1, [7] * length, 3).source for length in range(9)]
    # equals at first; what was not verified is judged all the same
    assert sources[0] == NGRAM
    assert set(sources[2:]) == {PREDICTION}
    # what a grammar leaves no choice about is certain, and begins where it was said to
    state.force(11, (7, 7, 7, 7, 7))
    assert state.propose(1, [7] * 9, 3).source == PREDICTION
    draft = state.propose(1, [7] * 11, 8)
    assert (draft.source, list(draft.token_ids)) == (GRAMMAR, [7, 7, 7, 7])
    assert state.acceptance.survivals(draft) == [1.0] * 4


def test_what_a_grammar_forbids_is_no_draft_however_long() -> None:
    class Says:
        def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
            return DraftTokens([8] * count, 5, NGRAM)

    state = DraftState([Says()], (1,), Acceptance())
    state.force(2, (7,))
    assert state.propose(1, [9], 8) == DraftTokens((7,), 0, GRAMMAR)
    # one that agrees and goes on is better
    state.force(3, (8,))
    assert list(state.propose(1, [9, 7], 8).token_ids) == [8] * 8


def test_what_came_before_the_first_draft_is_no_miss() -> None:
    others = Acceptance()
    state = DraftState([_scripted(PROMPT)], PROMPT, others)
    state.propose(len(PROMPT), expected_tokens(PROMPT, 4, VOCAB), 4)
    assert state.acceptance.share == Acceptance(others).share == Acceptance().share


def test_later_drafts_and_longer_matches_are_told_apart() -> None:
    seen = Acceptance()
    for _ in range(20):
        seen.note(NGRAM, 1, True, False)
        seen.note(NGRAM, 1, False, True)
        seen.note(NGRAM, 5, True, True)
        seen.note(PREDICTION, 1, True, True)
    high = (
        seen.rate(NGRAM, 1, False),
        seen.rate(NGRAM, 5, True),
        seen.rate(PREDICTION, 1, True),
    )
    assert seen.rate(NGRAM, 1, True) < 0.2 < 0.9 < min(high) < 1.0
    # what was seen long ago fades
    for _ in range(400):
        seen.note(NGRAM, 5, True, False)
    for _ in range(200):
        seen.note(NGRAM, 5, True, True)
    assert seen.rate(NGRAM, 5, True) > 0.6


def test_a_model_is_judged_by_what_it_made_and_only_then() -> None:
    state = DraftState([ModelDrafter()], PROMPT, Acceptance())
    answer = expected_tokens(PROMPT, 60, VOCAB)

    def likely(after: int) -> list[float]:
        draft = state.propose(len(PROMPT), answer[:after], 3)
        assert draft == DraftTokens([UNMADE] * 3, 0, DRAFT_MODEL)
        return state.acceptance.survivals(draft)

    first = likely(1)
    # what it was not asked for is no miss
    assert [likely(length) for length in range(2, 9)][-1] == first
    for length in range(8, 32, 3):
        state.learn(tuple(answer[length : length + 3]), 0, False)
        right = likely(length + 3)
    assert right[0] > 0.8 and right[2] > 0.6
    for length in range(32, 56):
        state.learn((answer[length] + 1, 0), 0, False)
        wrong = likely(length + 1)
    assert wrong[0] < 0.3
    # it had not caught up
    state.learn((), 40, True)
    assert likely(57) == wrong


def test_what_a_model_has_not_seen_is_counted() -> None:
    state = DraftState([ModelDrafter()], PROMPT, Acceptance())
    answer = expected_tokens(PROMPT, 60, VOCAB)
    state.propose(len(PROMPT), answer[:20], 3)
    assert state.num_unseen == len(PROMPT) + 20
    # it caught up with some, is never to see others, and then has nothing left
    state.learn((), len(PROMPT) + 4, True)
    state.propose(len(PROMPT), answer[:21], 3)
    assert state.num_unseen == len(PROMPT) + 5
    state.learn((1, 2), 0, False)
    state.propose(len(PROMPT), answer[:23], 3)
    assert state.num_unseen == 2


def test_a_model_is_asked_where_others_bring_less_than_a_token() -> None:
    state = DraftState([ModelDrafter(), _scripted(PROMPT)], PROMPT, Acceptance())
    answer = expected_tokens(PROMPT, 60, VOCAB)
    for _ in range(30):
        state.acceptance.note(DRAFT_MODEL, 0, True, True)
        state.acceptance.note(DRAFT_MODEL, 0, False, True)
    # one draft alone brings less than a token, however likely; several bring more
    assert state.propose(len(PROMPT), answer[:1], 1).source == DRAFT_MODEL
    assert state.propose(len(PROMPT), answer[:2], 6).source == NGRAM
    for _ in range(30):
        state.acceptance.note(NGRAM, 1, True, False)
    assert state.propose(len(PROMPT), answer[:3], 6).source == DRAFT_MODEL
    # what a grammar leaves no choice about is not left to it
    state.force(len(PROMPT) + 4, (7,))
    assert state.propose(len(PROMPT), answer[:4], 6).source == GRAMMAR
