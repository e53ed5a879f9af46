"""Adapters of every architecture on every path: as weights with the adapter merged in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import unavailable_reason
from paceline.backends.runner.interface import AttentionBatch, RowAdapter
from paceline.checkpoints.model.adapter import AdapterValues
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.open import open_adapter, open_checkpoint
from tests.backends.test_architectures import BLOCK, LENGTH, PROMPT, make_loader
from tests.backends.torch.models import save_model
from tests.checkpoints.adapters import random_pairs, write_peft

GREEDY = 64


class Merged:
    """A checkpoint with an adapter merged into its weights."""

    def __init__(self, checkpoint: Checkpoint, values: AdapterValues) -> None:
        self._checkpoint = checkpoint
        self._pairs = {
            f"model.layers.{pair.layer}.{pair.module}.weight": pair.scale * (b.astype(float) @ a)
            for pair, a, b in values.pairs
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def tensor_type(self, name: str) -> str:
        return "merged"

    def tensor(self, name: str) -> NDArray[np.float32]:
        return (self._checkpoint.tensor(name) + self._pairs.get(name, 0)).astype(np.float32)


class Sequence:
    """Logits of one sequence, with an adapter or without."""

    def __init__(self, checkpoint: Any, path: str, values: AdapterValues | None = None) -> None:
        loaded = make_loader(checkpoint, path).load(LENGTH // BLOCK, 0)
        self._model, self._done = loaded.model, 0
        self._model.clear_blocks(range(LENGTH // BLOCK))
        self._adapters: list[RowAdapter | None] | None = None
        if values is not None:
            assert loaded.make_adapter is not None
            self._adapters = [
                RowAdapter(loaded.make_adapter(values, dtype="float32", pause=lambda: None), 1.0)
            ]

    def feed(self, tokens: list[int]) -> NDArray[np.float64]:
        count = len(tokens)
        batch = AttentionBatch(
            np.array([self._done]), np.array([count]), np.arange(LENGTH // BLOCK)[None],
            self._adapters,
        )  # fmt: skip
        positions = np.arange(self._done, self._done + count)
        ids = np.array(tokens, dtype=np.int64)
        self._done += count
        logits = self._model.forward(ids, positions, batch, np.arange(count))
        return np.asarray(logits).astype(np.float64)


@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "olmo2", "phi3", "phi3-partial",
     "mixtral", "qwen3-moe-some-dense", "gpt-oss"],
)  # fmt: skip
def test_an_adapter_is_as_merged_weights(name: str, path: str, tmp_path: Path) -> None:
    if path == "native" and (reason := unavailable_reason()) is not None:
        pytest.skip(reason)
    save_model(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    folder = write_peft(tmp_path / "adapter", random_pairs(checkpoint.config), lora_alpha=2)
    values = open_adapter(folder, checkpoint.config).read()
    ours, wanted = Sequence(checkpoint, path, values), Sequence(Merged(checkpoint, values), path)
    got, exact = ours.feed(PROMPT), wanted.feed(PROMPT)
    plain = Sequence(checkpoint, path).feed(PROMPT)
    largest = np.abs(exact).max()
    assert np.abs(got - exact).max() < 1e-5 * max(1.0, largest)
    assert np.abs(got - plain).max() > 1e-2 * largest
    rows = got[-1], exact[-1]
    for _ in range(GREEDY):
        chosen = [int(row.argmax()) for row in rows]
        assert chosen[0] == chosen[1]
        rows = ours.feed(chosen[:1])[0], wanted.feed(chosen[1:])[0]


# of transformers, for what peft calls
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize(
    "fields",
    [
        {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
        {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {
            "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj"],
            "rank_pattern": {"v_proj": 6}, "alpha_pattern": {"layers.1.self_attn.o_proj": 3},
        },
    ],
    ids=["all", "rslora", "patterns"],
)  # fmt: skip
def test_an_adapter_is_as_peft_computes_it(
    fields: dict[str, Any], path: str, tmp_path: Path
) -> None:
    """What peft saves is read, and means what peft computes with it."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import torch
    import transformers

    if path == "native" and (reason := unavailable_reason()) is not None:
        pytest.skip(reason)
    save_model(tmp_path / "base", "llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **fields)).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.normal_(0, 0.2)
        exact = model(torch.tensor([PROMPT])).logits[0].double().numpy()
    model.save_pretrained(tmp_path / "adapter")
    checkpoint = open_checkpoint(tmp_path / "base")
    values = open_adapter(tmp_path / "adapter", checkpoint.config).read()
    got = Sequence(checkpoint, path, values).feed(PROMPT)
    largest = np.abs(exact).max()
    assert np.abs(got - exact).max() < 1e-5 * max(1.0, largest)
    assert np.abs(got - Sequence(checkpoint, path).feed(PROMPT)).max() > 1e-2 * largest
