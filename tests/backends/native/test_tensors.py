"""What is taken from a checkpoint, and what stays of it in memory."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.native.tensors import RawTensor, checkpoint_tensors
from paceline.checkpoints.open import open_checkpoint
from tests.backends.gguf_files import write_gguf as write_model
from tests.backends.torch.models import make_model, save_model
from tests.checkpoints.builders import HIDDEN, llama_tensors, write_gguf

SMAPS = Path("/proc/self/smaps")


def resident(path: Path) -> int:
    """Bytes of this process's memory that hold pages of a file."""
    total, counts = 0, False
    for line in SMAPS.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(str(path))
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not SMAPS.exists(), reason="needs /proc/self/smaps")
def test_pages_of_what_was_read_are_given_back(tmp_path: Path) -> None:
    tensors = llama_tensors()
    size = 4 << 20
    tensors["token_embd.weight"] = np.ones((size // 4 // HIDDEN, HIDDEN), dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors)
    checkpoint = open_checkpoint(path)
    for name, tensor in checkpoint_tensors(checkpoint):
        if name == "model.embed_tokens.weight":
            assert isinstance(tensor, RawTensor) and tensor.type == "F32"
            assert tensor.data.view(np.float32).sum() == size // 4
            assert resident(path) >= size
            kept = tensor
    assert resident(path) < size // 4
    # and what somebody kept is read again
    assert kept.data.view(np.float32).sum() == size // 4


@pytest.mark.skipif(not SMAPS.exists(), reason="needs /proc/self/smaps")
def test_experts_of_one_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 1024, "num_experts": 16}
    model = make_model("qwen3-moe", norm_topk_prob=True, num_hidden_layers=1, **sizes)
    path = write_model(tmp_path / "m.gguf", "qwen3-moe", model)
    one, most = 256 * 1024 * 4, 0
    for name, tensor in checkpoint_tensors(open_checkpoint(path)):
        if ".experts." in name:
            assert isinstance(tensor, RawTensor) and tensor.data.nbytes == one
            assert np.isfinite(tensor.data.view(np.float32)).all()
            most = max(most, resident(path))
    # the system maps the file in pieces of up to 2 MiB, one of which may begin in another expert
    assert one <= most <= one + 2 * (2 << 20) < 16 * one // 2


@pytest.mark.skipif(not SMAPS.exists(), reason="needs /proc/self/smaps")
def test_a_folder_is_mapped_and_not_copied(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", vocab_size=32_768)
    path = tmp_path / "model.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    for name, tensor in checkpoint_tensors(checkpoint):
        if name == "model.embed_tokens.weight":
            assert isinstance(tensor, RawTensor) and tensor.type == "F32"
            values = tensor.data.view(np.float32).sum()
            taken, size = tracemalloc.get_traced_memory()[1], tensor.data.nbytes
            assert resident(path) >= size > 4 * taken
            kept = tensor
    tracemalloc.stop()
    assert resident(path) < size // 4
    assert kept.data.view(np.float32).sum() == values
    np.testing.assert_array_equal(
        kept.data.view(np.float32), checkpoint.tensor("model.embed_tokens.weight")
    )


def test_a_head_that_nobody_needs_is_not_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=llama_tensors(tied=False)))
    names = [name for name, _ in checkpoint_tensors(checkpoint)]
    # the largest first
    assert set(names[:2]) == {"model.embed_tokens.weight", "lm_head.weight"}
    without = [name for name, _ in checkpoint_tensors(checkpoint, has_head=False)]
    assert without == [name for name in names if name != "lm_head.weight"]
