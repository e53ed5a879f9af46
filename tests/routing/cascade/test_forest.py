"""Forests: read by NumPy as scikit-learn reads them, and only where they can be."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.routing.cascade import (
    ANSWER_FORM,
    Features,
    Forest,
    Scorer,
    fit_forest,
    fit_scorer,
    form_of_answer,
)


def samples(count: int = 120) -> tuple[list[Features], list[bool]]:
    """An answer is good where exactly one of two values is positive: no sum tells that."""
    draw = np.random.default_rng(0)
    dense = draw.normal(size=(count, 3)).astype(np.float32)
    found = [Features(np.zeros(4, np.float32), each) for each in dense]
    return found, [bool((each[0] > 0) != (each[1] > 0)) for each in dense]


def test_a_forest_sees_what_a_sum_cannot() -> None:
    pytest.importorskip("sklearn")
    known, good = samples(400)
    new, truth = samples(60)
    forest, linear = fit_forest(known, good), fit_scorer(known, good)
    right = [
        np.mean([(each.score(f) > 0.5) == t for f, t in zip(new, truth, strict=True)])
        for each in (forest, linear)
    ]
    assert right[0] > 0.85 > 0.7 > right[1]
    again = Forest.of_bytes(forest.to_bytes(), forest.linear, 3)
    assert [again.score(f) for f in new] == [forest.score(f) for f in new]


def test_one_outcome_alone_is_learned() -> None:
    pytest.importorskip("sklearn")
    known, _ = samples(30)
    assert fit_forest(known, [True] * 30).score(known[0]) == 1.0
    assert fit_forest(known, [False] * 30).score(known[0]) == 0.0


def by_hand() -> Forest:
    """One tree: the first dense value decides."""
    node = np.dtype(
        [("value", "<u2"), ("threshold", "<f4"), ("left", "<u4"), ("right", "<u4"),
         ("share", "<f4")]
    )  # fmt: skip
    nodes = np.array([(1, 0.5, 1, 2, 0.4), (0, -2, 1, 1, 0.1), (0, -2, 2, 2, 0.9)], node)
    linear = Scorer(0.0, np.zeros(4, np.float32), np.zeros(3, np.float32))
    return Forest.of_nodes(linear, np.zeros(1, np.uint32), nodes)


def test_a_tree_by_hand() -> None:
    forest = by_hand()
    for value, share in ((0.4, 0.1), (0.6, 0.9)):
        features = Features(np.zeros(4, np.float32), np.array([value, 9, 9], np.float32))
        assert forest.score(features) == pytest.approx(share)


def test_bytes_that_are_no_forest_are_refused() -> None:
    forest = by_hand()
    data = forest.to_bytes()
    with pytest.raises(ConfigError, match="cannot be read"):
        Forest.of_bytes(data[:-1], forest.linear, 3)
    with pytest.raises(ConfigError, match="cannot be read"):
        Forest.of_bytes(b"", forest.linear, 3)
    with pytest.raises(ConfigError, match="a value beyond all"):
        Forest.of_bytes(data, forest.linear, 0)
    wrong = bytearray(data)
    wrong[4 + 4 + 6] = 9
    with pytest.raises(ConfigError, match="names node 9 of 3"):
        Forest.of_bytes(bytes(wrong), forest.linear, 3)


def test_form_of_an_answer() -> None:
    told = dict(zip(ANSWER_FORM, form_of_answer("Paris, 75.", "Is Paris big?"), strict=True))
    assert told["answer_digits"] == pytest.approx(0.2) and told["ends_a_sentence"] == 1.0
    assert told["share_of_prompt"] == 0.5 and told["repeats_prompt"] == 0.0
    assert told["words_ratio"] == pytest.approx(2 / 3) and told["begins_with_digit"] == 0.0
    told = dict(zip(ANSWER_FORM, form_of_answer("paris big", "Is Paris big?"), strict=True))
    assert told["repeats_prompt"] == 1.0
    assert np.isfinite(form_of_answer("", "")).all()
