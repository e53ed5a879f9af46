"""Hugging Face folders, compared with what transformers makes of the same files."""

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
from paceline.checkpoints.hf.config import read_hf_config
from paceline.checkpoints.hf.folder import read_folder
from paceline.checkpoints.model.checkpoint import expected_shapes
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.fields import warn_once
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import CheckpointError

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def write_model(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, torch.Tensor]:
    """Save a random model as transformers does; the weights that were saved."""
    shard_size = options.pop("max_shard_size", "1GB")
    config_class, model_class = ARCHITECTURES[kind]
    torch.manual_seed(1)
    special = {"bos_token_id": 1, "eos_token_id": 2}
    model = model_class(config_class(**{**SIZES, **special, **options})).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return dict(model.state_dict())


def read_config(folder: Path, **fields: Any) -> ModelConfig:
    """The config of a config.json with these fields."""
    base = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    merged = {key: value for key, value in {**base, **fields}.items() if value != "absent"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(merged))
    return read_hf_config(read_folder(folder)).model


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"head_dim": 16}),
    ("mistral", {"head_dim": 16, "sliding_window": 8}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_weights_and_shapes_are_those_of_transformers(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    state = write_model(tmp_path, kind, **options)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    assert config.model_type == kind and config.stored_dtype == "float32"
    assert config.eos_token_ids == {2} and config.bos_token_id == 1
    assert config.tie_word_embeddings == options.get("tie_word_embeddings", False)
    wanted = {name for name in state if not (config.tie_word_embeddings and "lm_head" in name)}
    assert set(checkpoint.tensor_names()) == wanted == set(expected_shapes(config))
    for name in wanted:
        assert checkpoint.tensor_shape(name) == tuple(state[name].shape)
        np.testing.assert_array_equal(checkpoint.tensor(name), state[name].numpy())


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")]
)
def test_half_precision_is_widened_exactly(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    state = write_model(tmp_path, dtype=dtype)
    checkpoint = open_folder(tmp_path)
    assert checkpoint.config.stored_dtype == name
    for tensor_name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.tensor(tensor_name), tensor.float().numpy())


def test_shards(tmp_path: Path) -> None:
    state = write_model(tmp_path, max_shard_size="20KB")
    checkpoint = open_folder(tmp_path)
    files = {checkpoint.tensor_file(name) for name in checkpoint.tensor_names()}
    assert len(files) > 2 and all(file.parent == tmp_path for file in files)
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor.numpy())


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
    },
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_both_spellings_of_rope_mean_the_same(tmp_path: Path, rope: dict[str, Any]) -> None:
    newer = read_config(tmp_path / "new", rope_parameters=rope).rope
    theta = {"rope_theta": rope["rope_theta"]}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    older = read_config(tmp_path / "old", rope_scaling=scaling, **theta).rope
    scaling["type"] = scaling.pop("rope_type")
    oldest = read_config(tmp_path / "oldest", rope_scaling=scaling, **theta).rope
    # what transformers writes
    transformers.LlamaConfig(**SIZES, rope_parameters=dict(rope)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    written = read_hf_config(read_folder(tmp_path)).model.rope
    assert newer == older == oldest == written
    assert (newer.kind, newer.theta) == (rope["rope_type"], rope["rope_theta"])
    assert newer.factor == rope.get("factor", 1.0)
    assert newer.original_max_position == rope.get("original_max_position_embeddings")
    assert newer.attention_factor == rope.get("attention_factor")
    assert newer.long_factor == tuple(rope.get("long_factor", ()))
    assert (newer.beta_fast, newer.beta_slow) == (
        rope.get("beta_fast", 32),
        rope.get("beta_slow", 1),
    )


def test_missing_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    for kind, (config_class, model_class) in ARCHITECTURES.items():
        theirs = config_class()
        theirs.save_pretrained(tmp_path)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        minimal = {name: getattr(theirs, name) for name in (*names, "num_attention_heads")}
        minimal["architectures"] = [model_class.__name__]
        (tmp_path / "config.json").write_text(json.dumps(minimal))
        ours = read_hf_config(read_folder(tmp_path)).model
        assert ours.model_type == kind
        for name in ("max_position_embeddings", "num_key_value_heads", "rms_norm_eps"):
            assert getattr(ours, name) == getattr(theirs, name), (kind, name)
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.sliding_window == theirs.to_dict().get("sliding_window")
        assert ours.bos_token_id == theirs.bos_token_id


def test_sliding_window_of_qwen(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "num_hidden_layers": 4}

    def layers(**fields: Any) -> tuple[int | None, tuple[int, ...]]:
        config = read_config(tmp_path, **qwen, **fields)
        theirs = transformers.Qwen2Config(
            **{**SIZES, "num_hidden_layers": 4}, **fields, sliding_window=8
        )
        kinds = [
            i for i, kind in enumerate(theirs.layer_types or []) if kind == "sliding_attention"
        ]
        if theirs.sliding_window is not None:
            assert config.sliding_layers == tuple(kinds)
        return config.sliding_window, config.sliding_layers

    assert layers() == (None, ())
    assert layers(use_sliding_window=False, max_window_layers=1) == (None, ())
    assert layers(use_sliding_window=True, max_window_layers=3) == (8, (3,))
    assert layers(use_sliding_window=True, max_window_layers=4) == (None, ())
    kinds = ["sliding_attention", "full_attention"] * 2
    assert layers(use_sliding_window=True, layer_types=kinds) == (8, (0, 2))


def test_sliding_window_of_mistral(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    config = read_config(tmp_path, **mistral, sliding_window=8)
    assert (config.sliding_window, config.sliding_layers) == (8, (0, 1))
    assert read_config(tmp_path, **mistral, sliding_window=None).sliding_window is None
    # LlamaConfig has no such field, so it has no effect there
    assert read_config(tmp_path, sliding_window=8).sliding_window is None


def test_end_of_sequence_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_config(tmp_path, eos_token_id=2).eos_token_ids == {2, 5, 6}
    assert read_config(tmp_path, eos_token_id=[3, 4]).eos_token_ids == {3, 4, 5, 6}
    assert read_config(tmp_path, eos_token_id=None).eos_token_ids == {5, 6}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("not supported; these are: ", {"architectures": ["GPT2LMHeadModel"]}),
    ("LlamaForCausalLM, MiMoForCausalLM, ", {"architectures": ["GPT2LMHeadModel"]}),
    ("attn_logit_softcapping=50.0", {"attn_logit_softcapping": 50.0}),
    ("residual_multiplier=0.22", {"residual_multiplier": 0.22}),
    ("num_local_experts=8", {"num_local_experts": 8}),
    ("never runs", {"architectures": ["MyModel"], "auto_map": {"AutoModel": "m.MyModel"}}),
    ("not supported", {"architectures": "absent", "model_type": "mamba"}),
    ("not supported", {"architectures": [None]}),
    ("GPTQ of None bits", {"quantization_config": {"quant_method": "gptq"}}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("vocab_size is missing", {"vocab_size": "absent"}),
    ("vocab_size is '48'", {"vocab_size": "48"}),
    ("num_hidden_layers is 0", {"num_hidden_layers": 0}),
    ("num_hidden_layers is -3", {"num_hidden_layers": -3}),
    ("1000000000000", {"num_hidden_layers": 10**12}),
    ("whole number", {"num_hidden_layers": 2.0}),
    ("whole number", {"num_hidden_layers": True}),
    ("hidden_size=32 is not a multiple of num_attention_heads=5", {"num_attention_heads": 5}),
    ("num_attention_heads=0", {"num_attention_heads": 0}),
    ("not a multiple of num_key_value_heads=3", {"num_key_value_heads": 3}),
    ("num_key_value_heads", {"num_key_value_heads": 0}),
    ("odd", {"head_dim": 7}),
    ("rms_norm_eps", {"rms_norm_eps": 0}),
    ("rms_norm_eps", {"rms_norm_eps": -1e-5}),
    ("rms_norm_eps", {"rms_norm_eps": "tiny"}),
    ("Infinity is not", {"rms_norm_eps": 1e999}),
    ("too large", {"rms_norm_eps": 10**400}),
    ("theta", {"rope_theta": 0}),
    ("rope type 'magic'", {"rope_scaling": {"rope_type": "magic", "factor": 2.0}}),
    ("factor is missing", {"rope_scaling": {"rope_type": "linear"}}),
    ("factor", {"rope_scaling": {"rope_type": "linear", "factor": -1}}),
    ("rope_scaling", {"rope_scaling": [1]}),
    ("differ between layers", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("high_freq_factor", {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}),
    ("long_factor has 1 entries", {"rope_scaling": {
        "rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1]}}),
    ("needs short_factor", {"rope_scaling": {"rope_type": "longrope"}}),
    ("eos_token_id", {"eos_token_id": "two"}),
    ("end-of-sequence id 48", {"eos_token_id": 48}),
    ("true or false", {"tie_word_embeddings": "yes"}),
    ("layer_types has 1 entries", {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
        "layer_types": ["full_attention"]}),
    ("chunked_attention", {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
        "layer_types": ["chunked_attention"] * 2}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "fields"), REFUSED)
def test_a_config_that_lies_is_refused(
    tmp_path: Path, message: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path, **fields)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_auto_map_of_a_supported_architecture_is_ignored(tmp_path: Path) -> None:
    # the built-in code knows it; the file that auto_map names is never looked for
    config = read_config(tmp_path, auto_map={"AutoModelForCausalLM": "gone.Gone"})
    assert config.model_type == "llama"


@pytest.mark.parametrize(
    ("dtype", "kind", "size"),
    [(torch.bfloat16, "BF16", 2), (torch.float16, "F16", 2), (torch.float32, "F32", 4)],
)
def test_raw_rows_are_the_stored_ones(
    tmp_path: Path, dtype: torch.dtype, kind: str, size: int
) -> None:
    weights = write_model(tmp_path, dtype=dtype)
    checkpoint = open_folder(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    raw, stored = checkpoint.raw_tensor(name)
    assert (stored, raw.dtype, raw.shape) == (kind, np.uint8, (32, 64 * size))
    again = torch.frombuffer(bytearray(raw.tobytes()), dtype=dtype).reshape(32, 64)
    assert torch.equal(again, weights[name])
    with pytest.raises(CheckpointError, match=r"shape \[32\]; only matrices have rows"):
        checkpoint.raw_tensor("model.norm.weight")


def test_special_ids_outside_the_vocabulary_count_as_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 48, -1]}')
    with caplog.at_level(logging.WARNING):
        config = read_config(tmp_path, eos_token_id=2, bos_token_id=151669, pad_token_id=-1)
    assert config.eos_token_ids == {2, 5} and config.bos_token_id is None
    told = [record.getMessage() for record in caplog.records]
    for file, key, token_id in (
        ("generation_config.json", "eos_token_id", 48),
        ("generation_config.json", "eos_token_id", -1),
        ("config.json", "bos_token_id", 151669),
        ("config.json", "pad_token_id", -1),
    ):
        assert any(line.startswith(f"{file}: {key} is {token_id}, ") for line in told), told
    # one of several that is inside will do
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read_config(tmp_path, eos_token_id=48).eos_token_ids == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2147483647]}')
    with pytest.raises(CheckpointError, match="answers would never end"):
        read_config(tmp_path, eos_token_id=[48])
    # a model without a head ends nothing
    assert not read_config(tmp_path, architectures=["LlamaModel"], eos_token_id=48).eos_token_ids


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
