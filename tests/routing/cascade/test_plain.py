"""Features and scores equal their plain form: bit for bit, but for the order of a sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.routing.cascade import (
    Features,
    Forest,
    Scorer,
    Token,
    confidence_of,
    fit_forest,
    form_of,
    form_of_answer,
    is_loop,
    ngrams_of,
)
from tests.routing.cascade import plain

PIECES = (
    "What is 7 + 5?",
    "Ünïcode İ 数字",
    "\x1c\x1f \u2003",
    "\n\t```\ndef f():",
    "ann",
    " ",
    "²½",
    "\ud800",
)
texts = st.text(max_size=600) | st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


@given(texts, st.integers(0, 40), st.integers(0, 5), st.booleans())
@example("", 1, 0, False)
@example("ab", 1, 0, False)
@example("İ" * 513, 1, 0, True)
def test_features_of_a_prompt(text: str, turns: int, tools: int, wants_json: bool) -> None:
    assert ngrams_of(text).tobytes() == plain.ngrams(text).tobytes()
    told = form_of(text, turns=turns, tools=tools, wants_json=wants_json)
    assert told == plain.form(text, turns, tools, wants_json)


@given(texts, texts)
@example("aB1", "")
def test_form_of_an_answer(answer: str, prompt: str) -> None:
    assert form_of_answer(answer, prompt) == plain.answer_form(answer, prompt)


@given(st.text(max_size=9), st.text("ab \n", max_size=60), st.integers(0, 60))
def test_loops(head: str, unit: str, times: int) -> None:
    assert is_loop(head + unit * times) == plain.is_loop(head + unit * times)


logprobs = st.floats(-40.0, 0.0)


@given(
    st.lists(st.tuples(logprobs, st.lists(logprobs, max_size=6)), min_size=1, max_size=60),
    st.integers(1, 60),
)
@example([(-0.5, [])] * 3, 24)
@example([(-0.5, [-0.5])], 1)
@example([(-0.1 * n, [-0.1 * n, -3.0, -4.0, -5.0, -6.0]) for n in range(60)], 24)
def test_confidence(rows: Any, first: int) -> None:
    # shares of one token's candidates sum to 1 at most
    tokens = [
        Token(logprob, [each - math.log(max(1, len(top))) for each in top]) for logprob, top in rows
    ]
    # sums are made in another order
    assert confidence_of(tokens, first) == pytest.approx(
        plain.confidence(tokens, first), rel=1e-12, abs=1e-12
    )


def test_scores_of_a_forest() -> None:
    pytest.importorskip("sklearn")
    draw = np.random.default_rng(3)
    dense = draw.normal(size=(700, 9)).astype(np.float32)
    none = Scorer(0.0, np.zeros(4, np.float32), np.zeros(9, np.float32))
    samples = [Features(np.zeros(4, np.float32), each) for each in dense]
    # noise, so that trees are as deep as they may be
    good = (draw.random(700) < 0.5).tolist()
    fitted = fit_forest(samples, good)
    forest = Forest.of_bytes(fitted.to_bytes(), none, 9)
    assert forest.to_bytes() == fitted.to_bytes()
    for each in samples[:60]:
        values = np.concatenate(([0.0], each.dense), dtype=np.float32)
        assert forest.score(each) == plain.leaves(forest, values)
