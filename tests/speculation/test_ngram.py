"""Prompt lookup finds the longest match, and takes a bounded time for each token."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from paceline.speculation.ngram import NgramDrafter


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        # the latest of two
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),
        # the longest of two
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2]),
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_ngrams(tokens: list[int], drafts: list[int]) -> None:
    assert list(NgramDrafter(2, 3).propose(tokens, 4).token_ids) == drafts
    # one made as the tokens came says the same
    slow = NgramDrafter(2, 3)
    answers = [list(slow.propose(tokens[: n + 1], 4).token_ids) for n in range(len(tokens))]
    assert answers[-1] == drafts


class _Watched(list[int]):
    """Counts how often a token is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


def test_no_call_reads_all_of_a_long_prompt() -> None:
    random = Random(1)
    prompt = [random.randrange(50_000) for _ in range(100_000)]
    drafter, tokens = NgramDrafter(1, 5), _Watched(prompt)
    looks, found = [], []
    # the output says a part of it again
    for token in prompt[50_000:50_110]:
        tokens.looks = 0
        said = drafter.propose(tokens, 8)
        looks.append(tokens.looks)
        found.append(list(said.token_ids) == prompt[50_000 + len(found) :][:8])
        tokens.append(token)
    assert max(looks) < 4_000
    # which is found once that is indexed
    assert not any(found[5:40]) and all(found[60:])


def test_one_token_in_all_places_is_looked_up_in_bounded_time() -> None:
    drafter = NgramDrafter(2, 8)
    tokens = _Watched([1, 2] * 5_000)
    for _ in range(20):
        drafter.propose(tokens, 4)
    tokens += [9, 1, 2]
    tokens.looks = 0
    # no place has the same before it, so many are tried
    assert drafter.propose(tokens, 4).match == 2
    assert tokens.looks < 500
