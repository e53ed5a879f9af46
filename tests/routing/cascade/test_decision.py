"""Scores, thresholds and conversations, against their definitions."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.routing.cascade import (
    Conversations,
    Easing,
    Features,
    Scorer,
    TooFewLabelsError,
    fit_scorer,
    labels_missing,
    pick_threshold,
)

labels = st.lists(
    st.tuples(st.sampled_from([i / 10 for i in range(11)]), st.floats(0, 1)),
    min_size=40,
    max_size=80,
)


@given(labels, st.sampled_from([0.03, 0.1, 0.3]))
def test_the_threshold_is_the_least_one_that_the_bound_allows(
    rows: list[tuple[float, float]], most: float
) -> None:
    scores, losses = zip(*rows, strict=True)
    found = pick_threshold(scores, losses, most)
    count = len(rows)

    def bound(threshold: float) -> float:
        lost = sum(loss for score, loss in rows if score >= threshold)
        return (lost + 1.0) / (count + 1)

    assert found in scores or math.isinf(found)
    assert bound(found) <= most + 1e-6
    assert all(bound(each) > most - 1e-6 for each in scores if each < found)


def test_a_bound_says_how_many_labels_are_missing() -> None:
    assert [labels_missing(0, alpha) for alpha in (0.05, 0.02, 0.3)] == [19, 49, 3]
    assert labels_missing(19, 0.05) == labels_missing(200, 0.05) == 0
    with pytest.raises(TooFewLabelsError, match=r"0.05 needs 19 labels, and there are 18: 1 are"):
        pick_threshold([0.5] * 18, [0.0] * 18, 0.05)
    assert pick_threshold([0.5] * 19, [0.0] * 19, 0.05) == 0.5


def test_the_mean_loss_over_new_requests_is_within_the_bound() -> None:
    """Scores that say little cost calls, never the bound."""
    draw = random.Random(5)
    for most in (0.05, 0.15):
        lost = []
        for _ in range(400):
            rows = []
            for _ in range(101):
                chance = draw.random()
                rows.append((0.5 * chance + 0.5 * draw.random(), float(draw.random() > chance)))
            threshold = pick_threshold(*zip(*rows[1:], strict=True), most)
            lost.append(rows[0][1] if rows[0][0] >= threshold else 0.0)
        error = float(np.std(lost)) / math.sqrt(len(lost))
        assert np.mean(lost) <= most + 2 * error
        assert np.mean(lost) > 0.2 * most


waits = st.lists(st.floats(0, 10), max_size=30)


@given(st.floats(0, 1), st.floats(0, 1), waits)
def test_load_moves_the_threshold_between_its_bounds_alone(
    one: float, other: float, seen: list[float]
) -> None:
    strict, eased = max(one, other), min(one, other)
    easing = Easing(strict, eased, 2.0)
    before = strict
    for wait in seen:
        found = easing.threshold(wait)
        assert eased <= found <= strict
        if wait >= 2.0:
            assert found == eased
        if wait >= 1.0:
            # it does not go back before the wait has halved
            assert found <= before + 1e-12
        before = found
    assert easing.threshold(0.0) == strict


def test_a_threshold_that_none_reached_moves_from_one() -> None:
    easing = Easing(math.inf, 0.6, 2.0)
    assert math.isinf(easing.threshold(0.1))
    assert easing.threshold(1.25) == pytest.approx(1.0 - 0.4 * 0.5) and easing.threshold(9) == 0.6
    assert easing.threshold(1.0) == 0.6 < easing.threshold(0.5) < easing.threshold(0.3)
    assert math.isinf(Easing(math.inf, math.inf, 2.0).threshold(9))


def test_conversations_go_up_and_stay() -> None:
    known = Conversations(most=2)
    a, b, c = (Conversations.key([b"tenant", name]) for name in (b"a", b"b", b"c"))
    assert Conversations.key([b"ab", b"c"]) != Conversations.key([b"a", b"bc"])
    assert not known.is_large(a)
    known.escalate(a)
    known.escalate(b)
    assert known.is_large(a)
    known.escalate(c)
    assert known.is_large(a) and not known.is_large(b) and len(known) == 2


def samples(count: int, seed: int) -> tuple[list[Features], list[bool]]:
    draw = np.random.default_rng(seed)
    ngrams = draw.normal(size=(count, 6)).astype(np.float32)
    dense = (draw.normal(size=(count, 2)) * [1.0, 50.0] + [3.0, 0.0]).astype(np.float32)
    good = ngrams[:, 0] + 0.02 * dense[:, 1] + draw.normal(size=count) > 0
    return [Features(*row) for row in zip(ngrams, dense, strict=True)], good.tolist()


def test_a_fit_is_the_minimum_of_its_loss() -> None:
    rows, good = samples(60, 1)
    scorer = fit_scorer(rows, good, 0.7)
    scale = np.std([row.dense for row in rows], axis=0)

    def loss(bias: float, ngrams: np.ndarray, dense: np.ndarray) -> float:
        total = 0.0
        for row, is_good in zip(rows, good, strict=True):
            sign = 1.0 if is_good else -1.0
            total += math.log1p(math.exp(-sign * (bias + ngrams @ row.ngrams + dense @ row.dense)))
        return total + 0.35 * float((ngrams**2).sum() + ((dense * scale) ** 2).sum())

    least = loss(scorer.bias, scorer.ngrams, scorer.dense)
    draw = np.random.default_rng(2)
    for _ in range(50):
        moved = loss(
            scorer.bias + 0.1 * draw.normal(),
            scorer.ngrams + 0.05 * draw.normal(size=6),
            scorer.dense + 0.05 * draw.normal(size=2) / scale,
        )
        assert moved >= least - 1e-4


def test_a_scorer_tells_good_from_bad_and_survives_its_file() -> None:
    scorer = fit_scorer(*samples(200, 3))
    rows, good = samples(300, 4)
    again = Scorer.of_bytes(scorer.to_bytes(), 6, 2)
    scores = np.array([again.score(row) for row in rows])
    assert scores.tolist() == pytest.approx([scorer.score(row) for row in rows], abs=1e-6)
    right = [(a > b) for a in scores[good] for b in scores[~np.array(good)]]
    assert np.mean(right) > 0.75
    for data, words in ((b"\0" * 8, "8 bytes, and 36 are"), (b"\xff" * 36, "not all finite")):
        with pytest.raises(ConfigError, match=words):
            Scorer.of_bytes(data, 6, 2)


@pytest.mark.parametrize("outcome", [True, False])
def test_one_outcome_alone_gives_one_score(outcome: bool) -> None:
    rows, _ = samples(20, 5)
    scorer = fit_scorer(rows, [outcome] * 20)
    scores = {round(scorer.score(row), 6) for row in rows}
    assert len(scores) == 1 and (scores.pop() > 0.9) == outcome
