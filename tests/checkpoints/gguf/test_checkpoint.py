"""Valid GGUF files: config, names, order of rows, dequantisation."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from numpy.typing import NDArray

from paceline.checkpoints.gguf.checkpoint import open_gguf
from paceline.checkpoints.gguf.container import SIZES, GGUFTensor, GGUFType
from paceline.checkpoints.gguf.data import GGUFData
from paceline.checkpoints.model.checkpoint import expected_shapes
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import CheckpointError
from tests.checkpoints.builders import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KEY_HEADS,
    LAYERS,
    VOCAB,
    llama_tensors,
    write_gguf,
)


def interleaved(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to q and k: dimension i of the first half of each head
    becomes row 2i, dimension i of the second half row 2i+1."""
    out = np.empty_like(weights)
    half = len(weights) // heads // 2
    for head in range(heads):
        start = head * 2 * half
        for i in range(half):
            out[start + 2 * i] = weights[start + i]
            out[start + 2 * i + 1] = weights[start + half + i]
    return out


def test_config_of_a_llama(tmp_path: Path) -> None:
    config = open_gguf(write_gguf(tmp_path / "m.gguf")).config
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("llama", VOCAB, HIDDEN)
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, KEY_HEADS)
    assert (config.head_dim, config.num_hidden_layers) == (HEAD_DIM, LAYERS)
    assert config.max_position_embeddings == 128
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings and not config.qkv_bias and not config.qk_norm
    assert config.stored_dtype == "float32"
    assert (config.sliding_window, config.sliding_layers) == (None, ())


def test_every_tensor_is_found_under_its_hugging_face_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    shapes = expected_shapes(checkpoint.config)
    assert checkpoint.tensor_names() == tuple(shapes)
    for name, shape in shapes.items():
        assert checkpoint.tensor_shape(name) == shape == checkpoint.tensor(name).shape
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        checkpoint.tensor("lm_head.weight")


def test_rows_of_q_and_k_are_put_back_for_llama_only(tmp_path: Path) -> None:
    wanted = llama_tensors(qkv_bias=True)
    stored = dict(wanted)
    for layer in range(LAYERS):
        for part, heads in (("attn_q", HEADS), ("attn_k", KEY_HEADS)):
            for kind in ("weight", "bias"):
                name = f"blk.{layer}.{part}.{kind}"
                stored[name] = interleaved(wanted[name], heads)
                assert not np.array_equal(stored[name], wanted[name])
    llama = open_gguf(write_gguf(tmp_path / "l.gguf", tensors=stored))
    qwen = open_gguf(write_gguf(tmp_path / "q.gguf", "qwen2", tensors=wanted))
    assert llama.config.qkv_bias and qwen.config.qkv_bias
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"}
    for projection, part in names.items():
        for kind in ("weight", "bias"):
            original = wanted[f"blk.1.{part}.{kind}"]
            for checkpoint in (llama, qwen):
                name = f"model.layers.1.self_attn.{projection}.{kind}"
                np.testing.assert_array_equal(checkpoint.tensor(name), original)


def test_raw_rows_are_in_the_same_order_as_values(tmp_path: Path) -> None:
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", quantise=Q.Q4_0))
    assert checkpoint.config.stored_dtype == "Q4_0"
    for name in checkpoint.tensor_names():
        if len(checkpoint.tensor_shape(name)) == 1:
            with pytest.raises(CheckpointError, match="only matrices"):
                checkpoint.raw_tensor(name)
            continue
        raw, kind = checkpoint.raw_tensor(name)
        assert kind == checkpoint.tensor_type(name)
        assert raw.dtype == np.uint8 and raw.shape[0] == checkpoint.tensor_shape(name)[0]
        values = gguf.quants.dequantize(np.ascontiguousarray(raw), Q[kind])
        np.testing.assert_array_equal(values, checkpoint.tensor(name))


def test_a_tensor_may_be_changed_and_the_file_stays(tmp_path: Path) -> None:
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf"))
    first = checkpoint.tensor("model.norm.weight")
    kept = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(checkpoint.tensor("model.norm.weight"), kept)


def half(data: bytes) -> float:
    return float(np.frombuffer(data, dtype=np.float16)[0])


def by_hand(kind: Q, block: bytes) -> list[float]:
    """One block of 32 values from the format's description, one value at a time."""
    if kind == Q.Q8_0:
        return [half(block[:2]) * value for value in struct.unpack("32b", block[2:])]
    scale = half(block[:2])
    offset = half(block[2:4]) if kind in (Q.Q4_1, Q.Q5_1) else 0.0
    rest = block[4:] if kind in (Q.Q4_1, Q.Q5_1) else block[2:]
    high = 0
    if kind in (Q.Q5_0, Q.Q5_1):
        high = int.from_bytes(rest[:4], "little")
        rest = rest[4:]
    values = []
    for i in range(32):
        quant = rest[i % 16] >> 4 if i >= 16 else rest[i] & 15
        quant |= (high >> i & 1) << 4
        zero = {Q.Q4_0: 8, Q.Q5_0: 16}.get(kind, 0)
        values.append((quant - zero) * scale + offset)
    return values


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=str)
def test_dequantisation_is_what_the_format_says(tmp_path: Path, kind: Q) -> None:
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", quantise=kind))
    name = "model.layers.1.mlp.down_proj.weight"
    raw, stored = checkpoint.raw_tensor(name)
    assert stored == kind.name
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    wanted = [
        [
            value
            for start in range(0, row.size, block_bytes)
            for value in by_hand(kind, row[start : start + block_bytes].tobytes())
        ]
        for row in raw
    ]
    np.testing.assert_allclose(checkpoint.tensor(name), wanted, rtol=1e-6, atol=1e-6)
    # and it is near what was quantised
    original = llama_tensors()["blk.1.ffn_down.weight"]
    assert np.abs(checkpoint.tensor(name) - original).max() < (0.05 if kind == Q.Q8_0 else 0.5)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16], ids=str)
def test_half_precision(tmp_path: Path, kind: Q) -> None:
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", quantise=kind))
    assert checkpoint.config.stored_dtype == {"F16": "float16", "BF16": "bfloat16"}[kind.name]
    original = llama_tensors()["blk.0.ffn_up.weight"]
    np.testing.assert_allclose(
        checkpoint.tensor("model.layers.0.mlp.up_proj.weight"), original, rtol=1e-2
    )


K_AND_I = [
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
]  # fmt: skip


@pytest.mark.parametrize("name", K_AND_I)
def test_every_common_quantisation_is_read(tmp_path: Path, name: str) -> None:
    # there is no quantiser for these here, so blocks are made up: 256 columns, 4 heads of 64
    hidden, heads = 256, 4
    kind = Q[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    metadata = {"block_count": 1, "context_length": 64, "embedding_length": hidden}
    metadata |= {"feed_forward_length": hidden, "attention.head_count": heads}
    for key, value in metadata.items():
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((4, hidden), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for norm in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{norm}.weight", np.ones(hidden, np.float32))
    raw = random.integers(0, 60, (hidden, hidden // block * size), dtype=np.uint8)
    for part in ("attn_q", "attn_k", "attn_v"):
        writer.add_tensor(f"blk.0.{part}.bias", np.ones(hidden, np.float32))
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    checkpoint = open_gguf(path)
    values = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert values.shape == (hidden, hidden) and values.dtype == np.float32
    np.testing.assert_array_equal(values, gguf.quants.dequantize(raw, kind))
    assert np.isfinite(values).all() and values.any()
    stored, stored_kind = checkpoint.raw_tensor("model.layers.0.mlp.up_proj.weight")
    np.testing.assert_array_equal(stored, raw)
    assert stored_kind == name


def test_qwen3_has_norms_on_queries_and_keys(tmp_path: Path) -> None:
    tensors = llama_tensors(qk_norm=True, tied=False)
    change = {"qwen3.attention.key_length": HEAD_DIM, "qwen3.attention.value_length": HEAD_DIM}
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", "qwen3", change=change, tensors=tensors))
    assert checkpoint.config.qk_norm and not checkpoint.config.tie_word_embeddings
    np.testing.assert_array_equal(
        checkpoint.tensor("model.layers.1.self_attn.k_norm.weight"),
        tensors["blk.1.attn_k_norm.weight"],
    )
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight"), tensors["output.weight"])


def test_qwen3_without_its_norms_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3")
    with pytest.raises(CheckpointError, match="q_norm"):
        open_gguf(path)


def test_rope_settings(tmp_path: Path) -> None:
    plain = open_gguf(write_gguf(tmp_path / "a.gguf")).config.rope
    assert (plain.kind, plain.theta, plain.freq_factors) == ("default", 10000.0, ())

    change = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    linear = open_gguf(write_gguf(tmp_path / "b.gguf", change=change)).config.rope
    assert (linear.kind, linear.factor) == ("linear", 4.0)

    older = open_gguf(
        write_gguf(tmp_path / "c.gguf", change={"llama.rope.scale_linear": 2.0})
    ).config.rope
    assert (older.kind, older.factor) == ("linear", 2.0)

    change = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    yarn = open_gguf(write_gguf(tmp_path / "d.gguf", change=change)).config.rope
    assert (yarn.kind, yarn.factor, yarn.original_max_position) == ("yarn", 4.0, 32)
    assert yarn.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))

    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    tensors = {**llama_tensors(), "rope_freqs.weight": factors}
    llama3 = open_gguf(write_gguf(tmp_path / "e.gguf", tensors=tensors))
    assert llama3.config.rope.freq_factors == (1.0, 2.0, 4.0, 8.0)
    assert "rope_freqs.weight" not in llama3.tensor_names()


def test_a_sliding_window_counts_for_every_layer(tmp_path: Path) -> None:
    change = {"llama.attention.sliding_window": 16}
    config = open_gguf(write_gguf(tmp_path / "m.gguf", change=change)).config
    assert (config.sliding_window, config.sliding_layers) == (16, (0, 1))


def test_values_repeated_per_layer_must_agree(tmp_path: Path) -> None:
    change = {"llama.attention.head_count_kv": [KEY_HEADS] * LAYERS}
    config = open_gguf(write_gguf(tmp_path / "m.gguf", change=change)).config
    assert config.num_key_value_heads == KEY_HEADS
    change = {"llama.attention.head_count_kv": [1, 2]}
    with pytest.raises(CheckpointError, match="differs between layers"):
        open_gguf(write_gguf(tmp_path / "n.gguf", change=change))


def test_larger_alignment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_gguf(write_gguf(tmp_path / "m.gguf")).tensor("model.norm.weight")

    class Wide(gguf.GGUFWriter):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_custom_alignment(4096)

    monkeypatch.setattr(gguf, "GGUFWriter", Wide)
    wide = open_gguf(write_gguf(tmp_path / "wide.gguf"))
    assert wide.metadata["general.alignment"] == 4096
    np.testing.assert_array_equal(wide.tensor("model.norm.weight"), plain)


@pytest.mark.thorough
def test_smollm2(smollm2_path: Path) -> None:
    checkpoint = open_gguf(smollm2_path)
    config = checkpoint.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.stored_dtype == "Q4_1" and config.tie_word_embeddings
    assert config.eos_token_ids == {2} and config.bos_token_id == 1
    assert len(checkpoint.tensor_names()) == 272
    reader = gguf.GGUFReader(smollm2_path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    pairs = {
        "blk.7.attn_v": "model.layers.7.self_attn.v_proj",
        "blk.29.ffn_down": "model.layers.29.mlp.down_proj",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
        "token_embd": "model.embed_tokens",
    }
    for theirs, ours in pairs.items():
        tensor = stored[f"{theirs}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(checkpoint.tensor(f"{ours}.weight"), values)
    for key in ("llama.rope.freq_base", "tokenizer.ggml.pre", "tokenizer.chat_template"):
        assert checkpoint.metadata[key] == reader.fields[key].contents()
    assert checkpoint.metadata["tokenizer.ggml.tokens"][:3] == [
        "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    ]  # fmt: skip
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert checkpoint.metadata["tokenizer.ggml.token_type"].tolist() == types
    checkpoint.forget_vocabulary()
    assert "tokenizer.ggml.pre" in checkpoint.metadata
    for name in ("tokens", "merges", "token_type"):
        assert f"tokenizer.ggml.{name}" not in checkpoint.metadata


def test_types_are_those_of_the_gguf_package() -> None:
    assert {kind.name: kind.value for kind in GGUFType} == {kind.name: kind.value for kind in Q}
    assert {kind.name: size for kind, size in SIZES.items()} == {
        kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()
    }


@pytest.mark.parametrize("kind", [Q.IQ4_NL, Q.Q2_K, Q.BF16], ids=lambda kind: kind.name)
def test_values_are_made_some_rows_at_a_time(tmp_path: Path, kind: Q) -> None:
    rows, columns = 4096, 1024
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 60, (rows, columns // block * size), dtype=np.uint8)
    path = tmp_path / "data"
    path.write_bytes(b"before" + raw.tobytes())
    data = GGUFData([path])
    tensor = GGUFTensor("x", (rows, columns), GGUFType(kind), 6, raw.nbytes)
    expected = gguf.quants.dequantize(raw, kind)
    tracemalloc.start()
    values = data.values(tensor)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(values, expected)
    # what comes of it, and not as much again of what lies between
    assert most < 1.75 * values.nbytes
    # the caller may change what it gets
    values[:] = 0
    data.release()
    assert (data.values(tensor) == expected).all()
