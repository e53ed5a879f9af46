"""What weights, keys and values take is told without loading them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from paceline.backends.loading.memory_estimate import served_memory
from paceline.backends.native import (
    NativeModel,
    NativeSettings,
    checkpoint_tensors,
    choose_kinds,
    packed_bytes,
    unavailable_reason,
)
from paceline.backends.native.library import limits
from paceline.backends.native.step import native_step_bytes
from paceline.backends.runner.rope import rotary_tables
from paceline.backends.torch.attention import block_bytes
from paceline.backends.torch.machine import choose_dtype, dtype_name
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.open import open_checkpoint
from paceline.core.pooling import PoolingInfo
from paceline.errors import ConfigError
from tests.backends.conftest import load
from tests.backends.quantised_folders import write
from tests.backends.torch.models import save_model
from tests.pooling.models import add_modules, make_bert, make_decoder

NATIVE = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))


def packed(checkpoint: Checkpoint, dtype: str) -> int:
    model = NativeModel(
        checkpoint.config,
        checkpoint_tensors(checkpoint),
        rotary_tables(checkpoint.config, 32),
        NativeSettings(
            dtype=dtype, num_blocks=1, threads=1, kinds=choose_kinds(checkpoint, dtype).numbers
        ),
    )
    found = model.weight_bytes
    model.close()
    return found


@NATIVE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "qwen3", "phi3", "mixtral", "qwen3-moe-some-dense", "gpt-oss"]
)
def test_bytes_of_matrices_are_those_of_the_library(name: str, dtype: str, tmp_path: Path) -> None:
    save_model(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    found = packed(checkpoint, dtype)
    matrices = sum(len(checkpoint.tensor_shape(each)) == 2 for each in checkpoint.tensor_names())
    # each matrix and each row of scales begins at a multiple of 64 bytes
    assert 0 <= found - packed_bytes(checkpoint, dtype) <= 64 * 2 * matrices


@NATIVE
@pytest.mark.parametrize("layout", ["awq", "gptq-act-order"])
def test_bytes_of_quantised_folders(layout: str, tmp_path: Path) -> None:
    write(tmp_path, layout)
    checkpoint = open_checkpoint(tmp_path)
    found = packed(checkpoint, "q4")
    assert 0 <= found - packed_bytes(checkpoint, "q4") <= 64 * 2 * (4 * 3 + 2)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2"])
def test_formats_are_those_that_serve_takes(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, name)
    memory = served_memory(tmp_path)
    backend = load(tmp_path, compute="auto", dtype="auto", block_size=16)
    info = backend.info
    backend.close()
    assert (memory.compute, memory.dtype, memory.kv_dtype) == (info.name, info.dtype, info.kv_dtype)
    # what window layers keep lies in blocks of their own where there are any
    windows = memory.window_bytes_per_token if info.num_window_blocks else 0
    assert memory.kv_bytes_per_token - windows == info.block_bytes / info.block_size
    config = open_checkpoint(tmp_path).config
    least = 2 * config.vocab_size * config.hidden_size
    assert memory.weight_bytes > least


def test_planning_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "mixtral")
    # a block that the native cache does not have, so PyTorch would compute it
    with_torch = served_memory(tmp_path, block_size=8)
    assert with_torch.compute == "torch"
    config, dtype = open_checkpoint(tmp_path).config, choose_dtype("auto", "cpu")
    assert with_torch.kv_bytes_per_token == block_bytes(config, 8, dtype) / 8
    assert with_torch.dtype == dtype_name(dtype)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert served_memory(tmp_path, block_size=8) == with_torch


def test_of_another_device(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    there, here = served_memory(tmp_path, device="cuda:1"), served_memory(tmp_path, device="cpu")
    assert (there.device, there.compute, there.dtype) == ("cuda:1", "torch", "bfloat16")
    # which has another memory than the processes
    assert there.process_bytes == 0 < here.process_bytes
    assert here.device == "cpu"
    with pytest.raises(ConfigError, match="device 'tpu' is not supported"):
        served_memory(tmp_path, device="tpu")


@NATIVE
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_what_is_pooled_is_planned_as_it_is_served(stored: torch.dtype, tmp_path: Path) -> None:
    make_decoder(tmp_path, vocab_size=2000, tie_word_embeddings=False)
    model = transformers.AutoModel.from_pretrained(tmp_path).to(stored)
    model.save_pretrained(tmp_path)
    add_modules(tmp_path, "lasttoken", max_seq_length=64)
    memory = served_memory(tmp_path)
    backend = load(tmp_path, compute="auto", dtype="auto", block_size=16)
    assert isinstance(backend.info.pooling, PoolingInfo)
    assert (memory.dtype, memory.kv_dtype) == (backend.info.dtype, backend.info.kv_dtype)
    assert memory.dtype == str(stored).removeprefix("torch.")
    backend.close()
    # one table, and no head
    config = open_checkpoint(tmp_path).config
    table = config.vocab_size * config.hidden_size * stored.itemsize
    assert table < memory.weight_bytes < 2 * table


def test_what_has_no_cache_is_not_planned(tmp_path: Path) -> None:
    make_bert(tmp_path)
    add_modules(tmp_path, "mean_tokens")
    with pytest.raises(ConfigError, match="attends to both sides and has no KV cache"):
        served_memory(tmp_path)


@NATIVE
def test_a_step_takes_what_it_is_computed_in(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = open_checkpoint(tmp_path).config
    page, rows = 2 << 20, 1 << 16
    found = native_step_bytes(config, rows, 0)
    heads = config.num_attention_heads * config.head_dim
    widest = max(config.hidden_size, config.intermediate_size, heads)
    # the sum of layers, activations and their scales, q, k and v, queries twice and the MLP's
    values = config.hidden_size + widest + widest // 8 + 2 + heads
    values += 2 * config.num_key_value_heads * config.head_dim
    values += 2 * heads + config.num_attention_heads + config.intermediate_size
    assert 0 <= found - 4 * rows * values < 9 * page
    logits = native_step_bytes(config, rows, 100) - found
    assert 0 <= logits - 400 * config.vocab_size < page


@NATIVE
def test_a_step_through_experts_takes_what_their_pairs_do(tmp_path: Path) -> None:
    save_model(tmp_path, "mixtral")
    config = replace(open_checkpoint(tmp_path).config, expert_intermediate_size=8000)
    dense = replace(config, num_experts=0)
    wide = max(config.hidden_size, config.expert_intermediate_size)
    per_pair = config.hidden_size + config.expert_intermediate_size + wide + wide // 8 + 2
    most = limits().pass_pairs // config.experts_per_token
    for rows in (1024, most, 4 * most):
        # there is no MLP for all rows
        other = 4 * rows * config.intermediate_size
        found = native_step_bytes(config, rows, 0) - native_step_bytes(dense, rows, 0) + other
        passed = min(rows, most)
        of_rows = 4 * passed * (config.hidden_size + config.num_experts)
        of_pairs = 4 * passed * config.experts_per_token * per_pair
        assert abs(found - of_rows - of_pairs) < 16 * (2 << 20)


@NATIVE
def test_the_default_model(smollm2_path: Path) -> None:
    memory = served_memory(smollm2_path)
    assert memory.compute == "native"
    found = packed(open_checkpoint(smollm2_path), memory.dtype)
    assert memory.weight_bytes == pytest.approx(found, rel=0.001)
