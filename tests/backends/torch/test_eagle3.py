"""EAGLE-3 heads: read as the hub has them, computed as published, and refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.backends.loading.load import load_backend
from paceline.backends.loading.settings import BackendSettings
from paceline.checkpoints.heads.eagle3 import Eagle3Head, is_eagle3
from paceline.errors import CheckpointError, ConfigError
from tests.backends.torch.heads import play, prompts_of, reference_guesses, rewrite, save_eagle3
from tests.backends.torch.models import VOCAB, save_model

HIDDEN = 48


def _play(
    folder: Path,
    head: Path,
    prompts: Sequence[Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
    **core: Any,
) -> list[tuple[list[int], list[int]]]:
    """Known tokens and the guesses that followed, of all that the head guessed."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
    seen = play(folder, config, prompts, monkeypatch, {"draft_path": str(head)}, **core)
    return [(each.known, each.guesses) for each in seen]


@pytest.mark.parametrize(
    ("head", "layers"),
    [
        # as the first heads have it, of a model with three layers
        ({}, (2, 1, 0)),
        ({"layers": (0, 2), "embeds": True, "hidden": 32}, (0, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]}}, (1, 2, 1)),
        ({"prefix": "layers.0", "norm_before_residual": True, "draft_vocab": VOCAB}, (2, 1, 0)),
    ],
    ids=["first", "own embeddings", "eagle_config", "other names"],
)
def test_guesses_are_those_of_the_published_layer(
    tmp_path: Path, head: dict[str, Any], layers: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "served", "llama")
    tensors = save_eagle3(tmp_path / "head", served_hidden=HIDDEN, **head)
    assert is_eagle3(tmp_path / "head") and not is_eagle3(tmp_path / "served")
    seen = _play(
        tmp_path / "served",
        tmp_path / "head",
        prompts_of(5, 40, 23),
        monkeypatch,
        max_num_batched_tokens=16,
        max_num_seqs=8,
    )
    guessed = [entry for entry in seen if len(entry[1]) == 4]
    assert len(guessed) > 20
    for known, guesses in guessed[:: max(1, len(guessed) // 12)]:
        before = head.get("norm_before_residual", False)
        expected = reference_guesses(
            model, tensors, known, 4, layers=layers, norm_before_residual=before
        )
        assert guesses == expected


def test_a_prefix_that_is_found_is_seen_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "served", "llama")
    tensors = save_eagle3(tmp_path / "head", served_hidden=HIDDEN)
    prompt = [7, 9, 4] * 15
    seen = _play(
        tmp_path / "served",
        tmp_path / "head",
        [prompt, [*prompt, 5, 6]],
        monkeypatch,
        max_num_seqs=1,
    )
    for known, guesses in seen[:3] + seen[-3:]:
        assert guesses == reference_guesses(model, tensors, known, len(guesses), layers=(2, 1, 0))


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({}, {"fc.weight": None}, "no matrix fc.weight, so it is no EAGLE-3 head"),
        ({}, {"midlayer.hidden_norm.weight": None}, "no tensor midlayer.hidden_norm.weight"),
        ({}, {"lm_head.weight": torch.zeros(9, 48)}, r"lm_head.weight has shape \[9, 48\]"),
        ({}, {"d2t": torch.zeros(90)}, "d2t is stored as F32, must be I64"),
        ({}, {"midlayer.q_norm.weight": torch.zeros(8)}, "1 tensors that an EAGLE-3 head does not"),
        ({"fc_norm": True}, {}, "fc_norm=True is not supported"),
        ({"model_type": "qwen3"}, {}, "model_type 'qwen3' is no Llama's layer"),
        ({"norm_before_residual": 3}, {}, "norm_before_residual is 3, must be true or false"),
        ({"eagle_aux_hidden_state_layer_ids": [1, -2]}, {}, r"is \[1, -2\], must be a list of"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_malformed_heads_are_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], said: str
) -> None:
    save_eagle3(tmp_path, served_hidden=HIDDEN)
    rewrite(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=said):
        Eagle3Head(tmp_path)


@pytest.mark.parametrize(
    ("head", "settings", "said"),
    [
        ({"served_hidden": 50}, {}, "reads 150 numbers, and 3 layers of the served model give 144"),
        ({"layers": (1, 2, 4)}, {}, "layers 1, 2, 4 are given, and the served model has 3"),
        ({"vocab": 400, "draft_vocab": 380}, {}, "the served model has 160"),
        ({"hidden": 32}, {}, "is 32 wide and brings no embeddings"),
        ({"embeds": True, "vocab": 150}, {}, "embeds 150 tokens, and the served model has 160"),
        ({}, {"compute": "native"}, "serve with --compute torch, or have tokens drafted by"),
    ],
)
def test_a_head_of_another_model_is_refused_with_the_numbers(
    tmp_path: Path, head: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    save_model(tmp_path / "served", "llama")
    save_eagle3(tmp_path / "head", **({"served_hidden": HIDDEN, "hidden": HIDDEN} | head))
    chosen = {"compute": "torch", "dtype": "float32", "num_blocks": 8} | settings
    if chosen["compute"] == "native":
        from paceline.backends.native import unavailable_reason

        if unavailable_reason() is not None:
            pytest.skip(str(unavailable_reason()))
    with pytest.raises(ConfigError, match=said):
        load_backend(
            tmp_path / "served",
            BackendSettings(device="cpu", draft_path=str(tmp_path / "head"), **chosen),
        ).close()


def test_layers_are_counted_from_the_embedding(tmp_path: Path) -> None:
    def layers(**changes: Any) -> tuple[int, ...]:
        save_eagle3(tmp_path, served_hidden=HIDDEN, **changes)
        return Eagle3Head(tmp_path).layers(36)

    assert layers() == (2, 18, 33)
    assert layers(layers=(24, 30, 36)) == (24, 30, 36)
    # those that give, one before those that are given
    assert layers(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}) == (2, 18, 33)
    assert np.array_equal(
        Eagle3Head(tmp_path).token_ids(),
        np.flatnonzero(load_file(tmp_path / "model.safetensors")["t2d"].numpy()),
    )
