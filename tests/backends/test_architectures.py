"""Every architecture on every path against transformers: logits in float32 from whole prompts and
from chunks, and greedy ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.backends.loading.architectures import support_table
from paceline.backends.native import unavailable_reason
from paceline.backends.native.step import NativeLoader
from paceline.backends.runner.interface import AttentionBatch, ModelLoader
from paceline.backends.torch.load import TorchLoader
from paceline.checkpoints.architectures import granite
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import ConfigError
from tests.backends.conftest import load
from tests.backends.gguf_files import FILES, write_gguf
from tests.backends.native.reference import levels
from tests.backends.torch.models import ARCHITECTURES, VOCAB, make_model, save_model

BLOCK = 16
LENGTH = 128
PROMPT = [(i * 37 + 11) % VOCAB for i in range(41)]
GREEDY = 64
# as many as there are
EVERY_EXPERT = {
    "mixtral": {"num_experts_per_tok": 5},
    "qwen3-moe": {"num_experts_per_tok": 7},
    "gpt-oss": {"num_experts_per_tok": 5},
}


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
    return make_native(checkpoint)


def make_native(checkpoint: Checkpoint) -> NativeLoader:
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
    if path == "native" and (reason := unavailable_reason()) is not None:
        pytest.skip(reason)
    loader = make_loader(checkpoint, path)
    theirs = expected(model, PROMPT)
    same(Sequence(loader).feed(PROMPT), theirs)
    # the torch path in all chunks is for torch/test_parity.py
    for chunk in (1, 7, 16) if path == "native" else (16,):
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


@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize("name", list(FILES))
def test_gguf_files_give_the_logits_of_transformers(name: str, path: str, tmp_path: Path) -> None:
    model = make_model(name, **FILES[name][2])
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", name, model))
    if path == "native" and (reason := unavailable_reason()) is not None:
        pytest.skip(reason)
    sequence = Sequence(make_loader(checkpoint, path))
    ours = [sequence.feed(PROMPT[:19]), sequence.feed(PROMPT[19:])]
    same(np.concatenate(ours), expected(model, PROMPT))


@pytest.mark.parametrize(
    "name",
    ["gemma2", "gemma3", "granite", "olmo2", "smollm3", "phi3-partial", "mixtral",
     "qwen3-moe-some-dense", "gpt-oss"],
)  # fmt: skip
@pytest.mark.parametrize("isa", levels())
def test_every_level_and_team_of_native_kernels(name: str, isa: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    for threads in (1, 3):
        loader = replace(make_native(checkpoint), isa=isa, threads=threads)
        sequence = Sequence(loader)
        # enough rows that members take rows of their own, and then few
        ours = [sequence.feed(PROMPT[:35]), sequence.feed(PROMPT[35:])]
        same(np.concatenate(ours), expected(model, PROMPT))


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3", "granite", "olmo2", "mixtral", "qwen3-moe", "gpt-oss"]
)
# at most 0.014, 0.043 and 0.32 were found
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.03), ("int8", 0.08), ("q4", 0.5)])
def test_reduced_formats_are_close(name: str, dtype: str, most: float, tmp_path: Path) -> None:
    """Far from the 1 and more that a lost norm or factor costs, as near as the rounding allows.
    Rows go to all experts: where two are liked nearly alike, rounding may choose the other, and a
    random model then says something else (int8 0.19 instead of 0.03 for Mixtral)."""
    if (reason := unavailable_reason()) is not None:
        pytest.skip(reason)
    model = save_model(tmp_path, name, **EVERY_EXPERT.get(name, {}))
    loader = replace(make_native(open_checkpoint(tmp_path)), dtype=dtype, kv_dtype="bfloat16")
    ours, theirs = Sequence(loader).feed(PROMPT), expected(model, PROMPT)
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert error < most


def test_a_path_that_lacks_a_shape_says_so(tmp_path: Path) -> None:
    if (reason := unavailable_reason()) is not None:
        pytest.skip(reason)
    save_model(tmp_path, "gemma2", attn_logit_softcapping=2e6)
    with pytest.raises(ConfigError, match=r"a soft cap of 2e\+06 is not.*--compute torch serves"):
        load(tmp_path, compute="native", block_size=16)
    backend = load(tmp_path, compute="auto", block_size=16)
    assert backend.info.name == "torch"
    assert "a soft cap of 2e+06 is not from 1e-06 to 1e+06" in backend.info.choice
    backend.close()


def test_the_page_shows_what_loads() -> None:
    page = (Path(__file__).parents[2] / "docs/use/models.md").read_text()
    assert support_table() in page
    module = Path(granite.__file__).read_text()
    assert f"```python\n{module}```" in page
