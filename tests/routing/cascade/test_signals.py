"""Signals of answers, log-probabilities and prompts, against their definitions."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.routing.cascade import (
    CONFIDENCE,
    FORM,
    NUM_BUCKETS,
    Answer,
    Token,
    confidence_of,
    exact_fault,
    form_of,
    is_loop,
    is_refusal,
    ngrams_of,
    violation,
)

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0}, "s": {"enum": ["a", True]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"text": "Paris"}, ""),
        ({"text": "Par", "finish_reason": "length"}, "length"),
        ({"text": "", "finish_reason": "content_filter"}, "refusal"),
        ({"text": "x", "refusal": "no"}, "refusal"),
        ({"text": "I\u2019m sorry, but I can't do that."}, "refusal"),
        ({"text": "As an AI language model, ..."}, "refusal"),
        ({"text": "He said: I'm sorry."}, ""),
        ({"text": " \n"}, "empty"),
        ({"text": "no no " * 20}, "loop"),
        ({"text": "{", "wants_json": True}, "json"),
        ({"text": "[1]", "wants_json": True}, ""),
        ({"text": '{"n": -1}', "wants_json": True, "schema": SCHEMA}, "json"),
        ({"text": '{"n": 1}', "wants_json": True, "schema": SCHEMA}, ""),
        ({"text": "", "calls": [("f", '{"n": 1}')], "tools": {"f": SCHEMA}}, ""),
        ({"text": "", "calls": [("f", '{"m": 1}')], "tools": {"f": SCHEMA}}, "tool"),
        ({"text": "", "calls": [("g", "{}")], "tools": {"f": SCHEMA}}, "tool"),
        ({"text": "Paris", "tools": {"f": SCHEMA}, "wants_call": True}, "tool"),
        ({"text": "", "calls": [("f", '{"n": 1}')], "tools": {"f": 1}, "wants_call": True}, ""),
    ],
)
def test_exact_faults(fields: dict[str, Any], fault: str) -> None:
    assert exact_fault(Answer(**fields)) == fault
    assert is_refusal(fields["text"]) <= (fault == "refusal")


@given(st.text("abc ", min_size=1, max_size=30), st.text(max_size=40))
def test_what_repeats_to_the_end_is_a_loop(unit: str, before: str) -> None:
    if unit.strip():
        assert is_loop(before + unit * (48 // len(unit) + 4))


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=60))
def test_different_lines_are_no_loop(numbers: list[int]) -> None:
    assert not is_loop("".join(f"{number:07d} is a line\n" for number in numbers))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "bc", 0.5, 1.0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ns"), inner),
    max_leaves=6,
)
schemas = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", "integer", "number", "null"]),
            "enum": st.lists(json_values, min_size=1, max_size=3),
            "const": json_values,
            "minItems": st.integers(0, 2),
            "maxLength": st.integers(0, 2),
            "minimum": st.integers(-1, 1),
            "required": st.lists(st.sampled_from("ns"), unique=True),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("ns"), inner),
            "additionalProperties": st.booleans() | inner,
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=5,
)


@given(json_values, schemas)
def test_schemas_are_read_as_jsonschema_reads_them(value: Any, schema: dict[str, Any]) -> None:
    good = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert good == (violation(value, schema) == "")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": [["object"]]},
        {"enum": 1},
        {"minimum": "0"},
        {"anyOf": 7},
        {"required": 1},
        {"properties": ["n"]},
        {"type": "integer"},
    ],
)
def test_no_answer_is_lost_to_a_malformed_schema_or_a_huge_number(schema: dict[str, Any]) -> None:
    for text in ('{"n": 1}', "9" * 400, "[1]"):
        assert exact_fault(Answer(text=text, wants_json=True, schema=schema)) in ("", "json")
    assert exact_fault(Answer(text="9" * 400, wants_json=True, schema={"type": "integer"})) == ""


logprobs = st.floats(-15.0, -0.001)


@given(st.lists(st.tuples(logprobs, st.lists(logprobs, max_size=5)), min_size=1, max_size=40))
def test_confidence_is_what_its_names_say(rows: list[tuple[float, list[float]]]) -> None:
    # shares of one token's candidates sum to 1 at most
    tokens = [
        Token(logprob, [each - math.log(max(1, len(top))) for each in top]) for logprob, top in rows
    ]
    told = dict(zip(CONFIDENCE, confidence_of(tokens, 8), strict=True))
    for prefix, run in (("first_", tokens[:8]), ("", tokens)):
        found = [token.logprob for token in run]
        margins = []
        for token in run:
            top = sorted(token.top, reverse=True)
            margins.append(top[0] - top[1] if len(top) > 1 else 20.0)
        entropies = []
        for token in run:
            shares = [math.exp(each) for each in token.top]
            rest = [1.0 - sum(shares)] if token.top and 1.0 - sum(shares) > 1e-9 else []
            entropies.append(-sum(share * math.log(share) for share in [*shares, *rest]))
        expected = {
            "logprob_min": min(found), "logprob_mean": np.mean(found),
            "logprob_q10": np.quantile(found, 0.1), "margin_q25": np.quantile(margins, 0.25),
            "margin_min": min(margins), "entropy": np.mean(entropies),
        }  # fmt: skip
        for name, value in expected.items():
            assert told[prefix + name] == pytest.approx(value, abs=1e-4), name
    assert told["log_length"] == pytest.approx(math.log(len(tokens)))


def test_an_answer_without_tokens_has_no_confidence() -> None:
    assert confidence_of([], 8) == [0.0] * len(CONFIDENCE)


@given(st.text(max_size=300))
def test_ngrams_are_a_vector_of_length_one_in_which_case_is_nothing(text: str) -> None:
    found = ngrams_of(text)
    assert found.shape == (NUM_BUCKETS,) and (ngrams_of(text) == found).all()
    assert float(found @ found) == pytest.approx(1.0, abs=1e-4) or not found.any()
    assert (ngrams_of(text) == ngrams_of(text.lower())).all()


def test_ngrams_of_one_machine_hold_on_another() -> None:
    """Weights are files, so these buckets may never change."""
    found = ngrams_of("add 12 and 30")
    assert np.flatnonzero(found)[:5].tolist() == BUCKETS
    near, far = ngrams_of("Add 12 and 31"), ngrams_of("Sort these names by length")
    assert float(found @ near) > 0.5 > 0.2 > float(found @ far)


BUCKETS = [68, 197, 257, 282, 316]


def test_the_form_of_a_prompt() -> None:
    text = "How many?\n```x = 1;```"
    told = dict(zip(FORM, form_of(text, turns=3, tools=2, wants_json=True), strict=True))
    assert told["questions"] == told["code"] == told["wants_json"] == 1.0
    assert told["log_turns"] == pytest.approx(math.log(4))
    assert told["digits"] == pytest.approx(1 / len(text))
    assert dict(
        zip(FORM, form_of("", turns=0, tools=0, wants_json=False), strict=True)
    ) == dict.fromkeys(FORM, 0.0)


def test_the_features_of_a_long_prompt_take_no_time() -> None:
    text = json.dumps({"rows": list(range(20_000))})
    best = math.inf
    for _ in range(20):
        began = time.perf_counter()
        ngrams_of(text[-4000:])
        form_of(text[-4000:], turns=1, tools=0, wants_json=False)
        best = min(best, time.perf_counter() - began)
    assert best < 2e-3
