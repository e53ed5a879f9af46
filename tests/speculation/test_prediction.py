"""The finger that follows an output through what was expected of it."""

from __future__ import annotations

from random import Random

import pytest

from paceline.speculation.prediction import PredictionDrafter


@pytest.mark.parametrize(
    ("output", "drafts"),
    [
        ([], [1, 2, 3, 4]),
        ([1, 2], [3, 4, 5, 1]),
        # another token in the place of one, and the next that is as expected
        ([1, 9], [3, 4, 5, 1]),
        ([1, 9, 3], [4, 5, 1, 2]),
        # the place that is nearest and has most before it, and the finger never goes to the prompt
        ([1, 2, 3, 4, 5, 1, 2, 7], [8, 3]),
        ([3], [4, 5, 1, 2]),
        ([8], [3]),
        ([6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6], []),
    ],
)
def test_the_finger_in_the_prediction(output: list[int], drafts: list[int]) -> None:
    prediction, prompt = (1, 2, 3, 4, 5, 1, 2, 7, 8, 3), (4, 5, 1, 2, 7)
    at_once = PredictionDrafter(prediction, len(prompt))
    assert list(at_once.propose([*prompt, *output], 4).token_ids) == drafts
    # one that saw the tokens come says the same
    slow = PredictionDrafter(prediction, len(prompt))
    for length in range(len(output) + 1):
        said = slow.propose([*prompt, *output[:length]], 4)
    assert list(said.token_ids) == drafts


def test_a_long_prediction_is_indexed_bit_by_bit() -> None:
    random = Random(1)
    prediction = [random.randrange(50_000) for _ in range(20_000)]
    drafter = PredictionDrafter(prediction, 0)
    assert list(drafter.propose([], 4).token_ids) == prediction[:4]
    assert drafter._num_indexed <= 512
    # half of it is left out, which is found once that is indexed
    output = prediction[:60] + prediction[10_000:10_060]
    for length in range(len(output) + 1):
        said = drafter.propose(output[:length], 4)
    assert list(said.token_ids) == prediction[10_060:10_064]


def test_a_long_output_is_read_bit_by_bit() -> None:
    # so long nothing was drafted, as others waited
    prediction = list(range(1_000))
    drafter = PredictionDrafter(prediction, 0)
    output = prediction[:500]
    said = [list(drafter.propose(output, 2).token_ids) for _ in range(5)]
    assert said == [[], [], [], [500, 501], [500, 501]]
