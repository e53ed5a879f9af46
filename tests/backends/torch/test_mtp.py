"""MTP layers: read as checkpoints have them, computed as published, and refused with
the reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.loading.load import load_backend
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.runner.interface import AttentionBatch
from paceline.backends.torch.head import HeadSettings
from paceline.backends.torch.mtp import MTPStep
from paceline.backends.torch.weights import load_weights
from paceline.checkpoints.heads.mtp import MTPLayers
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import ConfigError
from tests.backends.gguf_files import write_gguf
from tests.backends.torch.heads import Guessed, play, prompts_of, rewrite
from tests.backends.torch.models import make_model, save_model
from tests.backends.torch.mtp_models import MTPModel, save_mtp_model

CONFIG = {"method": "mtp", "num_speculative_tokens": 4}


def _check(model: MTPModel, seen: Sequence[Guessed]) -> None:
    """Guesses and their logits are those of the plain computation, from the first position on."""
    for each in seen:
        for place, (logits, guess) in enumerate(zip(each.logits, each.guesses, strict=True)):
            expected = model.logits(each.known, each.guesses[:place])
            assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
            assert guess == int(expected.argmax())


@pytest.mark.parametrize(
    ("name", "count"),
    [("mimo", 1), ("mimo", 2), ("mimo", 3), ("qwen3", 1), ("qwen3", 2), ("qwen3-moe", 1)],
)
@pytest.mark.parametrize("block_size", [4, pytest.param(16, marks=pytest.mark.thorough)])
def test_guesses_are_those_of_the_published_layers(
    tmp_path: Path, name: str, count: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_mtp_model(tmp_path, name, count=count)
    seen = play(
        tmp_path,
        CONFIG,
        prompts_of(5, 40, 23),
        monkeypatch,
        {"draft_mtp": True, "block_size": block_size},
        max_num_batched_tokens=16,
        max_num_seqs=8,
    )
    guessed = [each for each in seen if len(each.guesses) == 4]
    assert len(guessed) > 20
    _check(model, guessed[:: max(1, len(guessed) // 12)])


@pytest.mark.parametrize(("name", "count"), [("mimo", 1), ("mimo", 2), ("qwen3", 1)])
def test_a_prefix_that_is_found_is_seen_too(
    tmp_path: Path, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_mtp_model(tmp_path, name, count=count)
    prompt = [7, 9, 4] * 15
    seen = play(
        tmp_path,
        CONFIG,
        [prompt, [*prompt, 5, 6]],
        monkeypatch,
        {"draft_mtp": True},
        max_num_seqs=1,
    )
    assert len(seen) > 10
    _check(model, seen[:3] + seen[-3:])


def test_what_layers_gave_is_copied_with_a_block(tmp_path: Path) -> None:
    save_mtp_model(tmp_path, "mimo", count=2)
    checkpoint, cpu = open_checkpoint(tmp_path), torch.device("cpu")
    assert isinstance(checkpoint, HFCheckpoint)
    with torch.inference_mode():
        head = MTPStep(
            MTPLayers(checkpoint),
            load_weights(checkpoint, dtype=torch.float32, device=cpu),
            HeadSettings(block_size=4, max_model_len=64, dtype=torch.float32, device=cpu),
            num_blocks=8,
        )
        features = torch.randn(7, 96)

    def enter(first: int, end: int, last_block: int) -> list[torch.Tensor]:
        """Logits of the last position's guess, and of two more behind it."""

        def batch(start: int, stop: int) -> AttentionBatch:
            table = np.array([[3, last_block, 6]])
            return AttentionBatch(np.array([start]), np.array([stop - start]), table)

        at, tokens = np.arange(first, end), np.arange(first + 10, end + 10)
        known = [features[first:end]]
        found = [head.start(tokens, at, batch(first, end), known, np.array([end - first - 1]))]
        for place in (end, end + 1):
            token = np.array([place + 20])
            given = head.go_on(token, np.array([place]), batch(place, place + 1), np.array([0]))
            found.append(given)
        return found

    # as the engine does when it hands them out
    head.clear_blocks([1, 3, 5, 6])
    enter(0, 6, last_block=5)
    # as a fork's last block is
    head.copy_blocks([(5, 1)])
    expected = enter(6, 7, last_block=5)
    for ours, theirs in zip(enter(6, 7, last_block=1), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["mimo", "qwen3", "qwen3-moe"])
def test_a_model_is_the_same_with_such_layers_and_without(tmp_path: Path, name: str) -> None:
    save_mtp_model(tmp_path / "with", name, count=2)
    with_layers = open_checkpoint(tmp_path / "with")
    save_model(tmp_path / "without", {"mimo": "qwen2"}.get(name, name))
    without = open_checkpoint(tmp_path / "without")
    assert with_layers.tensor_names() == without.tensor_names()
    for tensor in without.tensor_names():
        assert (with_layers.tensor(tensor) == without.tensor(tensor)).all()
    assert with_layers.config.num_hidden_layers == without.config.num_hidden_layers


def test_layers_that_are_not_asked_for_are_in_no_model_s_way(tmp_path: Path) -> None:
    """Even beside a model whose layout of them is not known."""
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, {}, {"mtp.layers.0.input_layernorm.weight": torch.zeros(48)})
    _load(tmp_path, draft_mtp=False)
    with pytest.raises(
        ConfigError, match=r"together with mimo, qwen3, qwen3_moe.* is a llama, .* 1 tens"
    ):
        _load(tmp_path)


def _load(folder: Path, **settings: Any) -> None:
    chosen = {"compute": "torch", "dtype": "float32", "num_blocks": 8, "draft_mtp": True}
    load_backend(folder, BackendSettings(device="cpu", **(chosen | settings))).close()


MIMO = "model.mtp_layers.0."


@pytest.mark.parametrize(
    ("name", "config", "tensors", "said"),
    [
        ("mimo", {}, {f"{MIMO}input_proj.weight": None}, "lack 1 tensors, e.g. model.mtp_layers.0"),
        ("mimo", {}, {f"{MIMO}mlp.up_proj.weight": None}, "e.g. model.mtp_layers.0.mlp.up"),
        ("mimo", {}, {f"{MIMO}self_attn.q_norm.weight": torch.ones(16)}, "have in excess 1"),
        (
            "mimo",
            {},
            {f"{MIMO}input_proj.weight": torch.zeros(96, 96)},
            r"input_proj.weight has shape \[96, 96\], its config implies \[96, 192\]",
        ),
        (
            "mimo",
            {},
            {f"{MIMO}token_layernorm.weight": torch.zeros(96, dtype=torch.int8)},
            "token_layernorm.weight is stored as I8; of MTP layers these are read",
        ),
        ("mimo", {"num_nextn_predict_layers": 3}, {}, "has 1 MTP layers, its config.json names 3"),
        ("mimo", {"num_nextn_predict_layers": "x"}, {}, "num_nextn_predict_layers is 'x'"),
        (
            "mimo",
            {},
            {"model.mtp_layers.2.input_proj.weight": torch.zeros(96, 192)},
            "has MTP layers 0, 2, must be 0 and on without a gap, 16 at most",
        ),
        ("qwen3", {}, {"mtp.fc.weight": None}, "lack 1 tensors, e.g. mtp.fc.weight"),
        (
            "qwen3-moe",
            {},
            {"mtp.layers.0.mlp.shared_expert_gate.weight": torch.zeros(1, 48)},
            "have in excess 1 tensors, e.g. mtp.layers.0.mlp.shared_expert_gate",
        ),
    ],
)  # fmt: skip
def test_malformed_layers_are_refused(
    tmp_path: Path, name: str, config: dict[str, Any], tensors: dict[str, Any], said: str
) -> None:
    save_mtp_model(tmp_path, name)
    rewrite(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match=said):
        _load(tmp_path)
    # who does not ask for them is not told
    _load(tmp_path, draft_mtp=False)


def test_what_cannot_guess_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_model(tmp_path / "plain", "qwen3")
    with pytest.raises(ConfigError, match=r"plain has no MTP layers \(mtp.layers."):
        _load(tmp_path / "plain")
    rewrite(tmp_path / "plain", {"mtp_num_hidden_layers": 1}, {})
    with pytest.raises(ConfigError, match=r"though its config.json names 1"):
        _load(tmp_path / "plain")
    save_model(tmp_path / "llama", "llama")
    with pytest.raises(
        ConfigError, match=r"together with mimo, qwen3, qwen3_moe, and .* is a llama$"
    ):
        _load(tmp_path / "llama")
    file = write_gguf(tmp_path / "model.gguf", "qwen3", make_model("qwen3"))
    with pytest.raises(ConfigError, match="a GGUF file, of which MTP layers are"):
        _load(file)


def test_the_native_path_is_refused(tmp_path: Path) -> None:
    from paceline.backends.native import unavailable_reason

    if unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    save_mtp_model(tmp_path, "mimo", hidden_size=96)
    with pytest.raises(ConfigError, match="serve with --compute torch, or have tokens drafted by"):
        _load(tmp_path, compute="native")


def test_memory_of_layers_is_counted(tmp_path: Path) -> None:
    save_mtp_model(tmp_path, "mimo", count=3)
    sizes = {}
    for drafts in (False, True):
        settings = BackendSettings(
            device="cpu", compute="torch", dtype="float32", num_blocks=8, draft_mtp=drafts
        )
        backend = load_backend(tmp_path, settings)
        sizes[drafts] = backend.info.block_bytes
        backend.close()
    # three layers as the model's own, and of two what they gave: 96 numbers of 4 bytes a position
    assert sizes[True] - sizes[False] == sizes[False] + 2 * 96 * 4 * 16
