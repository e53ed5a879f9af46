"""A head that a config ties to the embedding, and a file that holds another one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.checkpoints.hf.checkpoint import open_folder
from paceline.checkpoints.model.special_ids import warn_once
from paceline.errors import CheckpointError
from tests.checkpoints.hf.test_checkpoint import write_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write(folder: Path, head: Any, dtype: torch.dtype = torch.float32, **config: Any) -> None:
    """A tied model whose file holds ``head``, made of the embedding, beside it."""
    write_model(folder, tie_word_embeddings=True, dtype=dtype)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[HEAD] = head(tensors[EMBEDDING].clone())
    save_file(tensors, path, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))


def changed(row: int) -> Any:
    def change(head: torch.Tensor) -> torch.Tensor:
        head[row, -1] += 1
        return head

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [0, -1])
def test_a_head_that_differs_is_the_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, row: int
) -> None:
    warn_once.cache_clear()
    write(tmp_path, changed(row), dtype)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_folder(tmp_path)
    (told,) = [record.getMessage() for record in caplog.records]
    assert not checkpoint.config.tie_word_embeddings and HEAD in checkpoint.tensor_names()
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wanted = theirs.state_dict()
    for name in (HEAD, EMBEDDING):
        np.testing.assert_array_equal(checkpoint.tensor(name), wanted[name].numpy())
    assert not torch.equal(wanted[HEAD], wanted[EMBEDDING])
    assert "tie_word_embeddings" in told and HEAD in told and str(tmp_path) in told


@pytest.mark.parametrize("head", [lambda same: same, lambda same: same.to(torch.float64)])
def test_a_head_that_is_the_embedding_stays_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: Any
) -> None:
    write(tmp_path, head)
    checkpoint = open_folder(tmp_path)
    assert checkpoint.config.tie_word_embeddings and HEAD not in checkpoint.tensor_names()
    assert not caplog.records


def test_a_head_of_a_model_without_one_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, changed(3), architectures=["LlamaModel"])
    assert open_folder(tmp_path).config.tie_word_embeddings


def test_a_head_alone_is_the_embedding_too(tmp_path: Path) -> None:
    write(tmp_path, changed(3))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[EMBEDDING]
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = open_folder(tmp_path)
    assert checkpoint.config.tie_word_embeddings
    np.testing.assert_array_equal(checkpoint.tensor(EMBEDDING), tensors[HEAD].numpy())


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path, lambda head: head[:-1].contiguous())
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[47, 32\]"):
        open_folder(tmp_path)
