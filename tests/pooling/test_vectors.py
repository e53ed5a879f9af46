"""Vectors through the whole engine against transformers: every way of pooling, alone and in a
batch, and in chunks where attention is causal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.pooling.models import (
    add_modules,
    assert_close,
    hidden_states,
    make_bert,
    make_decoder,
    make_roberta,
    open_llm,
    pool,
)

PROMPTS = [
    [(i * 37 + 11 * n) % 250 for i in range(length)] for n, length in enumerate((1, 5, 17, 70, 43))
]


def pooled(states: NDArray[np.float32], pooling: str) -> NDArray[np.float32]:
    if pooling == "mean":
        return states.mean(0)
    return states[-1] if pooling == "last" else states[0]


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return vector / np.linalg.norm(vector)


MODES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
@pytest.mark.parametrize("pooling", MODES)
def test_decoders_alone_in_a_batch_and_in_chunks(tmp_path: Path, kind: str, pooling: str) -> None:
    folder = make_decoder(tmp_path / "model", kind)
    add_modules(folder, MODES[pooling])
    expected = [unit(pooled(hidden_states(folder, prompt), pooling)) for prompt in PROMPTS]
    with open_llm(folder) as llm:
        for prompt, vector in zip(PROMPTS, expected, strict=True):
            assert_close(pool(llm, [prompt])[0], vector)
        for found, vector in zip(pool(llm, PROMPTS), expected, strict=True):
            assert_close(found, vector)
    with open_llm(folder, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        for found, vector in zip(pool(llm, PROMPTS), expected, strict=True):
            assert_close(found, vector)


@pytest.mark.parametrize("make", [make_bert, make_roberta])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_encoders_alone_and_in_a_batch(tmp_path: Path, make: object, pooling: str) -> None:
    assert callable(make)
    folder = make(tmp_path / "model")
    add_modules(folder, MODES[pooling])
    prompts = [[token % 40 for token in prompt][:64] for prompt in PROMPTS]
    # the padding's own number shifts RoBERTa's positions in transformers
    prompts = [[token + (token == 1) for token in prompt] for prompt in prompts]
    expected = [unit(pooled(hidden_states(folder, prompt), pooling)) for prompt in prompts]
    with open_llm(folder, num_blocks=None) as llm:
        for prompt, vector in zip(prompts, expected, strict=True):
            assert_close(pool(llm, [prompt])[0], vector)
        for found, vector in zip(pool(llm, prompts), expected, strict=True):
            assert_close(found, vector)
