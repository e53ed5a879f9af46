"""A request's tokens through the real engine and native kernels (docs/understand/accuracy.md).

They are the same alone and in a crowd, with preemption and hits of the prefix cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.backends.loading.load import load_backend
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.native import unavailable_reason
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.engine.types import GenerationOutput, GenerationRequest
from tests.backends.torch.models import VOCAB

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

COUNT = 20
FORMATS = [
    ("float32", "float32"),
    pytest.param("bfloat16", "bfloat16", marks=pytest.mark.thorough),
    pytest.param("bfloat16", "int8", marks=pytest.mark.thorough),
    pytest.param("int8", "bfloat16", marks=pytest.mark.thorough),
    ("int8", "int8"),
]


def _request(number: int, random: np.random.Generator, shared: list[int]) -> GenerationRequest:
    # every fifth begins as others do and sees more than one part of attention's keys
    begin = shared[: 100 + 8 * number] if number % 5 == 4 else []
    rest = random.integers(3, VOCAB, 10 + 3 * (number % 7)).tolist()
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_token_ids=begin + rest,
        sampling=SamplingParams(
            # the first say nothing of how much memory the last will need
            max_tokens=10 if number < COUNT // 2 else 150,
            temperature=0.7 if number % 2 else 0.0,
            seed=number,
        ),
        arrival_time=0.0,
    )


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    random = np.random.default_rng(1)
    shared = random.integers(3, VOCAB, 270).tolist()
    return [_request(number, random, shared) for number in range(COUNT)]


def _open(folder: Path, dtype: str, kv: str, *, prefix_caching: bool) -> LLM:
    settings = BackendSettings(
        device="cpu", dtype=dtype, kv_dtype=kv, compute="native", num_blocks=64, threads=2
    )
    core = null_core(
        load_backend(folder, settings),
        enable_prefix_caching=prefix_caching,
        max_num_seqs=32,
        max_num_batched_tokens=100,
    )
    return LLM(core, ByteTokenizer())


def _tokens(output: GenerationOutput) -> list[int]:
    return list(output.choices[0].token_ids)


@pytest.mark.parametrize(("dtype", "kv"), FORMATS)
def test_a_request_has_the_tokens_that_it_has_alone(
    folder: Path, requests: list[GenerationRequest], dtype: str, kv: str
) -> None:
    with _open(folder, dtype, kv, prefix_caching=False) as llm:
        alone = [_tokens(llm.generate([request])[0]) for request in requests]
    with _open(folder, dtype, kv, prefix_caching=True) as llm:
        crowded = llm.generate(requests)
    assert sum(output.num_preemptions for output in crowded) > 0
    assert sum(output.num_cached_tokens for output in crowded) > 0
    assert max(map(len, alone)) == 150
    assert [_tokens(output) for output in crowded] == alone
