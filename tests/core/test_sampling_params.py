"""Values of sampling parameters that are refused."""

from __future__ import annotations

import math

import pytest

from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("min_tokens", 11),
        ("logprobs", -1),
        ("seed", 2**63),
        ("logit_bias", ((-1, 0.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("stop_token_ids", frozenset(range(200))),
    ],
)
def test_sampling_params_refuse_bad_values_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**({"max_tokens": 10} | {field: value}))  # type: ignore[arg-type]
    assert caught.value.param == field
