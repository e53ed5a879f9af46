"""Vectors through the whole engine against transformers: every way of pooling, alone and in a
batch, and in chunks where attention is causal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from paceline.backends.native import unavailable_reason
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core
from paceline.engine.fanout import add_to_core
from tests.backends.gguf_files import write_gguf
from tests.pooling.models import (
    add_modules,
    assert_close,
    change_config,
    hidden_states,
    make_bert,
    make_decoder,
    make_roberta,
    open_llm,
    pool,
    pooled_request,
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


@pytest.mark.parametrize("compute", ["torch", "native"])
@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
@pytest.mark.parametrize("pooling", MODES)
def test_decoders_alone_in_a_batch_and_in_chunks(
    tmp_path: Path, kind: str, pooling: str, compute: str
) -> None:
    if compute == "native" and (reason := unavailable_reason()):
        pytest.skip(reason)
    folder = make_decoder(tmp_path / "model", kind)
    add_modules(folder, MODES[pooling])
    expected = [unit(pooled(hidden_states(folder, prompt), pooling)) for prompt in PROMPTS]
    with open_llm(folder, compute=compute) as llm:
        for prompt, vector in zip(PROMPTS, expected, strict=True):
            assert_close(pool(llm, [prompt])[0], vector)
        for found, vector in zip(pool(llm, PROMPTS), expected, strict=True):
            assert_close(found, vector)
    chunked = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with open_llm(folder, compute=compute, **chunked) as llm:
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


def test_native_states_of_gemma_and_granite(tmp_path: Path) -> None:
    """Their norms add 1 to a weight, and what layers add is multiplied; and what the file does not
    round is not rounded here."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    for kind, changes in (
        ("Gemma3", {"sliding_window": 16, "query_pre_attn_scalar": 16}),
        ("Granite", {"residual_multiplier": 0.22, "embedding_multiplier": 12.0,
                     "hidden_size": 64, "head_dim": 16}),
    ):  # fmt: skip
        folder = make_decoder(tmp_path / kind, kind, "Model", **changes)
        with open_llm(folder, compute="native") as llm:
            for prompt, found in zip(PROMPTS, pool(llm, PROMPTS), strict=True):
                assert_close(found, unit(hidden_states(folder, prompt)[-1]))
    with open_llm(folder, compute="auto", dtype="auto") as llm:
        info = llm._core.info
        assert (info.name, info.dtype) == ("native", "float32")
        assert "in float32 as the file is not rounded" in info.choice


def test_an_embedding_gemma(tmp_path: Path) -> None:
    """A decoder whose tokens see both sides, in a window or all: whole prompts, on PyTorch."""
    folder = make_decoder(
        tmp_path / "model", "Gemma3", "Model", use_bidirectional_attention=True, sliding_window=16,
        num_hidden_layers=4, sliding_window_pattern=2, query_pre_attn_scalar=16,
    )  # fmt: skip
    random = np.random.default_rng(1)
    dense = [
        (random.standard_normal((40, 32), dtype=np.float32), "Identity"),
        (random.standard_normal((32, 40), dtype=np.float32), "Identity"),
    ]
    add_modules(folder, "mean_tokens", dense=dense)
    expected = [
        unit(dense[1][0] @ (dense[0][0] @ hidden_states(folder, prompt).mean(0)))
        for prompt in PROMPTS
    ]
    with open_llm(folder, compute="auto", num_blocks=None) as llm:
        assert llm._core.info.name == "torch" and llm._core.info.block_bytes == 0
        assert "attention to both sides" in llm._core.info.choice
        for prompt, vector in zip(PROMPTS, expected, strict=True):
            assert_close(pool(llm, [prompt])[0], vector)
        for found, vector in zip(pool(llm, PROMPTS), expected, strict=True):
            assert_close(found, vector)


def test_files_as_qwen3_embedding_has_them(tmp_path: Path) -> None:
    """Tensors are named as those of the class without a head, and the config names the other."""
    folder = make_decoder(tmp_path / "model", tie_word_embeddings=True)
    expected = [unit(hidden_states(folder, prompt)[-1]) for prompt in PROMPTS]
    change_config(folder, architectures=["Qwen3ForCausalLM"])
    add_modules(folder, "lasttoken")
    with open_llm(folder) as llm:
        for found, vector in zip(pool(llm, PROMPTS), expected, strict=True):
            assert_close(found, vector)


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_a_gguf_file(tmp_path: Path, compute: str) -> None:
    if compute == "native" and (reason := unavailable_reason()):
        pytest.skip(reason)
    folder = make_decoder(tmp_path / "model", "Qwen3", "ForCausalLM")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    path = write_gguf(tmp_path / "model.gguf", "qwen3", model)
    engine = EngineSettings.of(
        model_name="tiny", model_path=str(path), runner="pooling", compute=compute,
        dtype="float32", threads=1, num_blocks=64,
    )  # fmt: skip
    core, info = build_core(engine)
    assert info.pooling is not None and info.pooling.pooling == "last"
    for number, prompt in enumerate(PROMPTS):
        add_to_core(core, pooled_request(str(number), prompt))
    while core.has_work:
        core.step()
    found = {name: np.frombuffer(vector, dtype="<f4") for name, vector in core.pooled}
    core.close()
    for number, prompt in enumerate(PROMPTS):
        assert_close(found[f"{number}/0"], unit(hidden_states(folder, prompt)[-1]))
