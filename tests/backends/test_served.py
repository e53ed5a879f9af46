"""What weights, keys and values take is told without loading them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.backends.native import (
    NativeModel,
    checkpoint_tensors,
    choose_kinds,
    packed_bytes,
    unavailable_reason,
)
from paceline.backends.rope import rotary_tables
from paceline.backends.served import served_memory
from paceline.checkpoints.base import Checkpoint, open_checkpoint
from tests.backends.conftest import load
from tests.backends.test_quantised import write
from tests.backends.torch.models import save_model

NATIVE = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))


def packed(checkpoint: Checkpoint, dtype: str) -> int:
    model = NativeModel(
        checkpoint.config,
        checkpoint_tensors(checkpoint),
        rotary_tables(checkpoint.config, 32),
        dtype=dtype,
        num_blocks=1,
        threads=1,
        kinds=choose_kinds(checkpoint, dtype).numbers,
    )
    found = model.weight_bytes
    model.close()
    return found


@NATIVE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4"])
@pytest.mark.parametrize(
    "name",
    ["llama", "llama-tied", "qwen3", "phi3", "mixtral", "qwen3-moe-some-dense", "gpt-oss"],
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
    assert memory.kv_bytes_per_token == info.block_bytes / info.block_size
    config = open_checkpoint(tmp_path).config
    least = 2 * config.vocab_size * config.hidden_size
    assert memory.weight_bytes > least


@NATIVE
def test_the_default_model(smollm2_path: Path) -> None:
    memory = served_memory(smollm2_path)
    assert memory.compute == "native"
    found = packed(open_checkpoint(smollm2_path), memory.dtype)
    assert memory.weight_bytes == pytest.approx(found, rel=0.001)
