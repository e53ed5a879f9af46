"""Adapters as files: what is served, what is refused and by which name, and the digest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.checkpoints.model.adapter import MODULES, AdapterFile
from paceline.checkpoints.open import open_adapter
from paceline.errors import CheckpointError
from tests.backends.native.reference import tiny_config
from tests.checkpoints.adapters import random_pairs, tensors_of, write_gguf_adapter, write_peft

CONFIG = tiny_config()
PAIRS = random_pairs(CONFIG)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def scales(file: AdapterFile) -> dict[tuple[int, str], float]:
    return {(pair.layer, pair.module): pair.scale for pair in file.pairs}


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = open_adapter(write_peft(tmp_path / "a", PAIRS, lora_alpha=8), CONFIG)
    values = file.read()
    assert {(pair.layer, pair.module) for pair, _, _ in values.pairs} == set(PAIRS)
    for pair, a, b in values.pairs:
        wanted = PAIRS[pair.layer, pair.module]
        assert np.array_equal(a, wanted[0])
        assert np.array_equal(b, wanted[1])
        assert pair.scale == 2.0
    assert file.max_rank == 4
    assert file.num_values == sum(a.size + b.size for a, b in PAIRS.values())
    assert file.notes == ("made for someone/base",)


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.model.", "base_model.model.base_model.model.model.",
     "base_model.model.language_model.model.", "base_model.model.model.language_model."],
)  # fmt: skip
def test_names_may_have_the_prefixes_of_wrappers(tmp_path: Path, prefix: str) -> None:
    plain = open_adapter(write_peft(tmp_path / "a", PAIRS), CONFIG).read().digest
    folder = write_peft(tmp_path / "b", PAIRS, tensors_of(PAIRS, prefix))
    assert open_adapter(folder, CONFIG).read().digest == plain


def test_scales_follow_the_fields(tmp_path: Path) -> None:
    pairs = PAIRS | {(1, MODULES[0]): random_pairs(CONFIG, rank=9)[1, MODULES[0]]}
    folder = write_peft(
        tmp_path / "a", pairs, lora_alpha=6, use_rslora=True, alpha_pattern={"down_proj": 2},
        rank_pattern={"model.layers.1.self_attn.q_proj": 9},
    )  # fmt: skip
    found = scales(open_adapter(folder, CONFIG))
    assert found[0, MODULES[0]] == 3.0
    assert found[1, MODULES[0]] == 2.0
    assert found[0, "mlp.down_proj"] == 1.0


@pytest.mark.parametrize(
    "fields",
    [{"exclude_modules": ["lm_head"]}, {"layers_to_transform": [0]}, {"layers_pattern": "layers"},
     {"target_modules": "all-linear"}, {"init_lora_weights": "gaussian"},
     {"qalora_group_size": 16}],
)  # fmt: skip
def test_tensors_decide_and_these_fields_do_not(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain = open_adapter(write_peft(tmp_path / "a", PAIRS), CONFIG).read()
    found = open_adapter(write_peft(tmp_path / "b", PAIRS, **fields), CONFIG).read()
    assert found.digest == plain.digest


def test_modules_to_save_without_tensors_are_told_and_harmless(tmp_path: Path) -> None:
    file = open_adapter(write_peft(tmp_path / "a", PAIRS, modules_to_save=["score"]), CONFIG)
    assert file.notes[0] == "modules_to_save=['score']: no such tensors are there"
    assert len(file.read().pairs) == len(PAIRS)


def test_matrices_may_lie_the_other_way_round(tmp_path: Path) -> None:
    tensors = {name: np.ascontiguousarray(each.T) for name, each in tensors_of(PAIRS).items()}
    folder = write_peft(tmp_path / "a", PAIRS, tensors, fan_in_fan_out=True)
    plain = open_adapter(write_peft(tmp_path / "b", PAIRS), CONFIG).read()
    assert open_adapter(folder, CONFIG).read().digest == plain.digest


def test_files_may_be_several_and_in_half_precision(tmp_path: Path) -> None:
    tensors = {name: each.astype(np.float16) for name, each in tensors_of(PAIRS).items()}
    whole = open_adapter(write_peft(tmp_path / "a", PAIRS, tensors), CONFIG).read()
    for (_, a, b), wanted in zip(whole.pairs, PAIRS.values(), strict=True):
        assert np.abs(a - wanted[0]).max() <= np.abs(a).max() / 1024
        assert np.abs(b - wanted[1]).max() <= np.abs(b).max() / 1024
    folder, names = write_peft(tmp_path / "b", PAIRS, tensors), sorted(tensors)
    (folder / "adapter_model.safetensors").unlink()
    files: dict[str, str] = {}
    for number in range(2):
        file = f"adapter_model-{number}.safetensors"
        save_file({name: tensors[name] for name in names[number::2]}, folder / file)
        files |= dict.fromkeys(names[number::2], file)
    index = folder / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert open_adapter(folder, CONFIG).read().digest == whole.digest


def test_the_digest_is_of_the_contents_alone(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a", PAIRS)
    digest = open_adapter(folder, CONFIG).read().digest
    shutil.copytree(folder, tmp_path / "other name")
    assert open_adapter(tmp_path / "other name", CONFIG).read().digest == digest
    others = [
        write_peft(tmp_path / "alpha", PAIRS, lora_alpha=5),
        write_peft(tmp_path / "values", random_pairs(CONFIG, seed=1)),
        write_peft(tmp_path / "fewer", random_pairs(CONFIG, modules=MODULES[:2])),
    ]
    found = {open_adapter(other, CONFIG).read().digest for other in others}
    assert len(found | {digest}) == 4


def test_a_gguf_file_equals_the_folder(tmp_path: Path) -> None:
    folder = open_adapter(write_peft(tmp_path / "a", PAIRS), CONFIG).read()
    path = write_gguf_adapter(
        tmp_path / "a.gguf", CONFIG, PAIRS, **{"adapter.lora.task_name": "sql"}
    )
    file = open_adapter(path, CONFIG)
    assert file.read().digest == folder.digest
    assert file.notes == ("adapter.lora.task_name=sql",)


def test_opening_and_reading_pause_after_each_pair(tmp_path: Path) -> None:
    """Steps run meanwhile, and nothing of it holds them up for long."""
    for path in (
        write_peft(tmp_path / "a", PAIRS),
        write_gguf_adapter(tmp_path / "a.gguf", CONFIG, PAIRS),
    ):
        pauses: list[None] = []
        file = open_adapter(path, CONFIG, pause=lambda: pauses.append(None))  # noqa: B023
        assert len(pauses) >= len(PAIRS)
        pauses.clear()
        file.read(lambda: pauses.append(None))  # noqa: B023
        assert len(pauses) == len(PAIRS)


def test_fused_modules_are_split(tmp_path: Path) -> None:
    """Phi-3's qkv_proj has one A for three matrices."""
    q, k, v = (PAIRS[0, module] for module in MODULES[:3])
    fused = np.concatenate((q[1], k[1], v[1]))
    tensors = {
        "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight": q[0],
        "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight": fused,
    }
    folder = write_peft(tmp_path / "a", PAIRS, tensors, target_modules=["qkv_proj"])
    values = open_adapter(folder, CONFIG).read()
    for (pair, a, b), wanted in zip(values.pairs, (q, k, v), strict=True):
        assert np.array_equal(a, q[0]), pair
        assert np.array_equal(b, wanted[1])


REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    ({"use_dora": True}, "use_dora"),
    ({"bias": "all"}, "bias"),
    ({"lora_bias": True}, "lora_bias"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"use_qalora": True}, "use_qalora"),
    *(
        ({"init_lora_weights": kind}, f"init_lora_weights={kind!r}")
        for kind in ("pissa", "pissa_niter_4", "olora", "corda", "loftq")
    ),
    ({"init_lora_weights": "of_tomorrow"}, "init_lora_weights='of_tomorrow' is not served"),
    ({"a_field_of_tomorrow": "on"}, "a_field_of_tomorrow"),
    ({"r": 5}, "has rank 4, r or rank_pattern says 5"),
    ({"target_modules": ["q_proj", "lm_head"]}, "target_modules names 'lm_head'"),
    ({"rank_pattern": {"(a+)+": 3}}, "plain names are served"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED_FIELDS)
def test_a_field_that_is_not_served_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    folder = write_peft(tmp_path / "a", PAIRS, **fields)
    with pytest.raises(CheckpointError) as caught:
        open_adapter(folder, CONFIG)
    assert said in str(caught.value)


def _with(name: str, values: Any) -> dict[str, Any]:
    return tensors_of(PAIRS) | {name: values}


def _without(name: str) -> dict[str, Any]:
    tensors = tensors_of(PAIRS)
    del tensors[name]
    return tensors


_ZEROS = np.zeros((4, 4), dtype=np.float32)
REFUSED_TENSORS: list[tuple[dict[str, Any], str]] = [
    (_with("base_model.model.lm_head.lora_A.weight", _ZEROS), "lm_head.lora_A.weight"),
    (_with("base_model.model.model.embed_tokens.lora_embedding_A", _ZEROS), "lora_embedding_A"),
    (_with("base_model.model.score.modules_to_save.weight", _ZEROS), "modules_to_save"),
    (_with(f"{FIRST}.lora_magnitude_vector", _ZEROS), "lora_magnitude_vector"),
    (_with("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", _ZEROS),
     "experts.0.up_proj"),
    (_with(f"{FIRST}.lora_A.default.weight", _ZEROS), "1 tensors are not served"),
    (_with(f"{FIRST}.lora_A.weight", np.array(1, np.float32)), "has rank 0, r or rank_pattern"),
    (_without(f"{FIRST}.lora_B.weight"), f"{FIRST}.lora_A.weight has no lora_B"),
    (_with("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", _ZEROS)
     | {"base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight": _ZEROS}, "layers.7"),
    (_with(f"{FIRST}.lora_B.weight", _ZEROS), "has shape [4, 4], the model needs [96, 4]"),
    ({}, "no tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "said"), REFUSED_TENSORS)
def test_every_tensor_is_used_or_the_adapter_is_refused(
    tmp_path: Path, tensors: dict[str, Any], said: str
) -> None:
    folder = write_peft(tmp_path / "a", PAIRS, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_adapter(folder, CONFIG)
    assert said in str(caught.value)


def test_values_are_checked_when_they_are_read(tmp_path: Path) -> None:
    for wrong in (np.nan, np.inf):
        bad = PAIRS[0, MODULES[0]][1].copy()
        bad[3, 1] = wrong
        folder = write_peft(tmp_path / "a", PAIRS, _with(f"{FIRST}.lora_B.weight", bad))
        with pytest.raises(CheckpointError, match=r"q_proj\.lora_B\.weight holds values that are"):
            open_adapter(folder, CONFIG).read()
    idle = {key: (a, np.zeros_like(b)) for key, (a, b) in PAIRS.items()}
    folder = write_peft(tmp_path / "b", idle)
    with pytest.raises(CheckpointError, match="would do nothing"):
        open_adapter(folder, CONFIG).read()


def test_paths_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_adapter(tmp_path / "nothing", CONFIG)
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        open_adapter(tmp_path, CONFIG)
    folder = write_peft(tmp_path / "a", PAIRS)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickle can run any code"):
        open_adapter(folder, CONFIG)
    with pytest.raises(CheckpointError, match="has rank 4, must be 1 to 3"):
        open_adapter(write_peft(tmp_path / "b", PAIRS), CONFIG, max_rank=3)
    alora = write_gguf_adapter(
        tmp_path / "b.gguf", CONFIG, PAIRS, **{"adapter.alora.invocation_tokens": "1"}
    )
    with pytest.raises(CheckpointError, match=r"adapter\.alora\.invocation_tokens is not served"):
        open_adapter(alora, CONFIG)
    model = write_gguf_adapter(tmp_path / "c.gguf", CONFIG, PAIRS, **{"general.type": "model"})
    with pytest.raises(CheckpointError, match=r"general\.type is 'model'"):
        open_adapter(model, CONFIG)
