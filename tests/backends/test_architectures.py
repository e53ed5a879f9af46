"""Every architecture on every path against transformers: logits in float32 from whole prompts and
from chunks, and greedy ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.backends.native import unavailable_reason, unsupported_reason
from paceline.backends.native.step import NativeLoader
from paceline.backends.steps import AttentionBatch, ModelLoader
from paceline.backends.torch.load import TorchLoader
from paceline.checkpoints.base import Checkpoint, open_checkpoint
from tests.backends.torch.models import ARCHITECTURES, VOCAB, save_model

BLOCK = 16
LENGTH = 128
PROMPT = [(i * 37 + 11) % VOCAB for i in range(41)]
GREEDY = 64


def make_loader(checkpoint: Checkpoint, path: str) -> ModelLoader:
    if path == "torch":
        return TorchLoader(
            checkpoint=checkpoint,
            dtype="float32",
            device="cpu",
            block_size=BLOCK,
            max_model_len=LENGTH,
            threads=1,
        )
    return NativeLoader(
        checkpoint=checkpoint,
        dtype="float32",
        kv_dtype="float32",
        block_size=BLOCK,
        max_model_len=LENGTH,
        threads=1,
    )


class Sequence:
    """One sequence through a path's step, in blocks that are not in order."""

    def __init__(self, loader: ModelLoader) -> None:
        count = LENGTH // BLOCK
        self._step = loader.load(count, 0).model
        self._step.clear_blocks(range(count))
        self._table = np.array([[(i * 3 + 1) % count for i in range(count)]], dtype=np.int64)
        self._done = 0

    def feed(self, tokens: list[int]) -> NDArray[np.float64]:
        """Logits of all the tokens, [tokens, vocab]."""
        count = len(tokens)
        batch = AttentionBatch(
            starts=np.array([self._done]), counts=np.array([count]), block_tables=self._table
        )
        logits = self._step.forward(
            np.array(tokens, dtype=np.int64),
            np.arange(self._done, self._done + count),
            batch,
            np.arange(count),
        )
        self._done += count
        return np.asarray(logits).astype(np.float64)


def expected(model: Any, tokens: list[int]) -> NDArray[np.float64]:
    with torch.no_grad():
        logits: NDArray[np.float64] = model(torch.tensor([tokens])).logits[0].double().numpy()
    return logits


def same(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> None:
    """Within 1e-4 of the largest logit of the row."""
    largest = np.abs(theirs).max(axis=1, keepdims=True)
    assert (np.abs(ours - theirs) / largest).max() < 1e-4


@pytest.mark.parametrize("path", ["torch", "native"])
# llama-longrope turns to other frequencies within these lengths, see torch/test_parity.py
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama-longrope"])
def test_logits_and_greedy_ids_are_those_of_transformers(
    name: str, path: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    if path == "native":
        if (reason := unavailable_reason()) is not None:
            pytest.skip(reason)
        if (reason := unsupported_reason(checkpoint.config, BLOCK)) is not None:
            pytest.skip(reason)
    loader = make_loader(checkpoint, path)
    theirs = expected(model, PROMPT)
    same(Sequence(loader).feed(PROMPT), theirs)
    for chunk in (1, 7, 16):
        pieces = Sequence(loader)
        ours = [pieces.feed(PROMPT[i : i + chunk]) for i in range(0, len(PROMPT), chunk)]
        same(np.concatenate(ours), theirs)
    sequence, tokens = Sequence(loader), list(PROMPT)
    row = sequence.feed(tokens)[-1]
    for _ in range(GREEDY):
        tokens.append(int(row.argmax()))
        row = sequence.feed(tokens[-1:])[0]
    theirs = expected(model, tokens[:-1])
    assert tokens[len(PROMPT) :] == theirs[len(PROMPT) - 1 :].argmax(axis=1).tolist()
