"""GGUF files that lie: each is refused with a message, at once, without taking memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.checkpoints.gguf.checkpoint import open_gguf
from paceline.checkpoints.gguf.container import read_gguf
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import CheckpointError
from tests.checkpoints.builders import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    U64,
    VOCAB,
    RawGGUF,
    RawTensor,
    array,
    raw_llama,
    scalar,
    strings,
    text,
)

Lie = Callable[[RawGGUF], None]
HUGE = 2**63 + 7


def put(key: str, kind: int, value: bytes) -> Lie:
    return lambda raw: raw.put(key, kind, value)


def number(key: str, kind: int, value: float) -> Lie:
    return put(f"llama.{key}", kind, scalar(kind, value))


def drop(key: str) -> Lie:
    def lie(raw: RawGGUF) -> None:
        before = len(raw.metadata)
        raw.metadata = [entry for entry in raw.metadata if entry[0] != key.encode()]
        assert len(raw.metadata) == before - 1

    return lie


def assign(name: str, value: object) -> Lie:
    return lambda raw: setattr(raw, name, value)


def tensor(name: str, /, **fields: object) -> Lie:
    """Change fields of one entry of the tensor table."""

    def lie(raw: RawGGUF) -> None:
        (entry,) = (t for t in raw.tensors if t.name == name.encode())
        for key, value in fields.items():
            setattr(entry, key, value)

    return lie


def nested(depth: int) -> bytes:
    value = array(U8, b"\1", 1)
    for _ in range(depth - 1):
        value = array(ARRAY, value, 1)
    return value


def twice(raw: RawGGUF) -> None:
    raw.tensors.append(RawTensor(raw.tensors[0].name, (32,), 0, 0))


def extra_layer(raw: RawGGUF) -> None:
    raw.tensors.append(RawTensor(b"blk.7.attn_norm.weight", (32,), 0, len(raw.data)))
    raw.data += bytes(128)


def rope_factors(*values: float) -> Lie:
    def lie(raw: RawGGUF) -> None:
        raw.tensors.append(RawTensor(b"rope_freqs.weight", (len(values),), 0, len(raw.data)))
        raw.data += struct.pack(f"<{len(values)}f", *values)

    return lie


def without(name: str) -> Lie:
    def lie(raw: RawGGUF) -> None:
        raw.tensors = [entry for entry in raw.tensors if entry.name != name.encode()]

    return lie


# (what is said about the file, part of the message, the lie)
LIES: list[tuple[str, str, Lie]] = [
    ("magic", "not a GGUF file", assign("magic", b"GGML")),
    ("version 1", "version 1", assign("version", 1)),
    ("version 99", "version 99", assign("version", 99)),
    ("big endian", "big-endian", assign("version", 3 << 24)),
    ("huge tensor count", "tensors, at most", assign("num_tensors", HUGE)),
    ("tensor count above the table", "name of tensor 20", assign("num_tensors", 5000)),
    ("huge metadata count", "metadata entries, at most", assign("num_metadata", HUGE)),
    ("metadata count above", "", assign("num_metadata", 60000)),
    ("key length", "bytes long", lambda raw: raw.metadata.insert(0, (b"k" * 70000, U8, b"\1"))),
    ("empty key", "empty key", lambda raw: raw.metadata.insert(0, (b"", U8, b"\1"))),
    ("key twice", "twice", lambda raw: raw.metadata.append(raw.metadata[0])),
    ("key not UTF-8", "not UTF-8", lambda raw: raw.metadata.insert(0, (b"\xff\xfe", U8, b"\1"))),
    ("string length", "needs", put("x", STRING, text("abc", claim=2**24 - 1))),
    ("huge string length", "bytes long", put("x", STRING, text("abc", claim=HUGE))),
    ("unknown metadata type", "unknown metadata type 77", put("x", 77, b"")),
    ("array of unknown type", "unknown metadata type 78", put("x", ARRAY, array(78, b"", 3))),
    ("numbers past the end", "needs", put("x", ARRAY, array(U64, b"", 2**40))),
    ("overflowing count", "needs", put("x", ARRAY, array(U64, b"", 2**61 + 1))),
    ("strings past the end", "claims", put("x", ARRAY, array(STRING, b"", 2**40))),
    ("string of an array", "claims", put("x", ARRAY, array(STRING, text("", claim=2**62), 1))),
    ("nested arrays", "nested deeper", put("x", ARRAY, nested(6))),
    ("very nested arrays", "nested deeper", put("x", ARRAY, nested(3000))),
    ("nested count", "claims", put("x", ARRAY, array(ARRAY, b"", 2**50))),
    ("alignment 0", "alignment", put("general.alignment", U32, scalar(U32, 0))),
    ("alignment 48", "alignment", put("general.alignment", U32, scalar(U32, 48))),
    ("alignment 2^31", "alignment", put("general.alignment", U32, scalar(U32, 2**31))),
    ("alignment text", "alignment", put("general.alignment", STRING, text("32"))),
    ("tensor twice", "twice", twice),
    ("tensor name long", "bytes long", tensor("output_norm.weight", name=b"n" * 65)),
    ("tensor name empty", "empty name", tensor("output_norm.weight", name=b"")),
    ("rank 0", "rank 0", tensor("output_norm.weight", rank=0)),
    ("rank 2^31", "rank", tensor("output_norm.weight", rank=2**31)),
    ("dimension 0", "empty dimension", tensor("output_norm.weight", dims=(0,))),
    ("dimensions overflow", "overflow", tensor("output_norm.weight", dims=(2**40, 2**40))),
    ("overflow to zero", "overflow", tensor("output_norm.weight", dims=(2**32, 2**32))),
    ("dimension too large", "the file has", tensor("output_norm.weight", dims=(2**30,))),
    ("unknown tensor type", "unknown type", tensor("output_norm.weight", kind=999)),
    ("removed tensor type", "unknown type", tensor("output_norm.weight", kind=4)),
    ("blocks do not divide", "do not divide", tensor("blk.0.attn_q.weight", kind=12)),
    ("offset not aligned", "alignment", tensor("output_norm.weight", offset=4)),
    ("offset past the end", "the file has", tensor("output_norm.weight", offset=2**40)),
    ("offset overflows", "the file has", tensor("output_norm.weight", offset=2**64 - 32)),
    ("tensors overlap", "overlap", tensor("output_norm.weight", offset=0)),
    ("data missing", "the file has", assign("data", b"")),
    ("integer weights", "not a type of weights", tensor("blk.0.ffn_up.weight", kind=26)),
    ("no architecture", "not supported", drop("general.architecture")),
    ("architecture", "these are", put("general.architecture", STRING, text("mamba"))),
    ("architecture a number", "string", put("general.architecture", U32, scalar(U32, 1))),
    (
        "split",
        "names like model-00001-of-00003.gguf",
        put("split.count", U32, scalar(U32, 3)),
    ),
    ("experts", "expert_used_count is missing", number("expert_count", U32, 8)),
    ("soft caps", "attn_logit_softcapping=50.0", number("attn_logit_softcapping", F32, 50.0)),
    ("scaled logits", "logit_scale=2.0", number("logit_scale", F32, 2.0)),
    ("no layers key", "missing", drop("llama.block_count")),
    ("0 layers", "num_hidden_layers", number("block_count", U32, 0)),
    ("-1 layers", "-1", number("block_count", I32, -1)),
    ("2^32-1 layers", "4294967295", number("block_count", U32, 2**32 - 1)),
    ("1 layer of 2", "does not have", number("block_count", U32, 1)),
    ("3 layers of 2", "missing", number("block_count", U32, 3)),
    ("layers a float", "whole number", number("block_count", F32, 2.0)),
    ("layers a bool", "whole number", number("block_count", BOOL, 1)),
    ("heads 0", "head_count", number("attention.head_count", U32, 0)),
    ("heads 5", "32 is not a multiple", number("attention.head_count", U32, 5)),
    ("key heads 3", "multiple", number("attention.head_count_kv", U32, 3)),
    ("key heads 0", "num_key_value_heads", number("attention.head_count_kv", U32, 0)),
    ("heads swapped", "shape", number("attention.head_count_kv", U32, 4)),
    ("hidden size", "shape", number("embedding_length", U32, 64)),
    ("inner", "shape", number("feed_forward_length", U32, 63)),
    ("value length", "dimensions", number("attention.value_length", U32, 4)),
    ("odd head", "odd", number("attention.key_length", U32, 7)),
    ("partial rotary", "rope.dimension_count", number("rope.dimension_count", U32, 4)),
    ("eps NaN", "rms_norm_eps", number("attention.layer_norm_rms_epsilon", F32, float("nan"))),
    ("eps 0", "rms_norm_eps", number("attention.layer_norm_rms_epsilon", F32, 0.0)),
    ("eps negative", "rms_norm_eps", number("attention.layer_norm_rms_epsilon", F32, -1e-5)),
    ("theta infinite", "theta", number("rope.freq_base", F32, float("inf"))),
    ("theta 0", "theta", number("rope.freq_base", F32, 0.0)),
    ("context 0", "max_position", number("context_length", U32, 0)),
    ("scaling", "not supported", put("llama.rope.scaling.type", STRING, text("magic"))),
    ("vocab size", "vocab_size", number("vocab_size", U32, 49)),
    ("short vocabulary", "47", put("tokenizer.ggml.tokens", ARRAY, array(STRING, strings(47), 47))),
    (
        "token types",
        "token_type has 3",
        put("tokenizer.ggml.token_type", ARRAY, array(I32, bytes(12), 3)),
    ),
    ("scores", "scores has 1", put("tokenizer.ggml.scores", ARRAY, array(F32, bytes(4), 1))),
    ("eos", "eos_token_id", put("tokenizer.ggml.eos_token_id", U32, scalar(U32, VOCAB))),
    ("no embedding", "token_embd", without("token_embd.weight")),
    ("no norm", "missing", without("output_norm.weight")),
    ("no projection", "missing", without("blk.1.ffn_down.weight")),
    ("extra layer", "does not have", extra_layer),
    ("transposed", "shape", tensor("blk.0.ffn_up.weight", dims=(64, 32))),
    ("embedding a vector", "shape", tensor("token_embd.weight", dims=(48,))),
    ("rope factors", "rope freq_factors has 8 entries", rope_factors(*[1.0] * 8)),
    ("rope factors NaN", "freq_factors[2]", rope_factors(1, 1, float("nan"), 1)),
]


def refused(path: Path, message: str) -> str:
    """Open ``path``: it must fail with CheckpointError, fast and small."""
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        elapsed = time.monotonic() - start
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert elapsed < 1.0
    assert peak < 32 << 20
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_the_file_that_the_lies_start_from_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_llama().encode())
    assert len(open_gguf(path).tensor_names()) == 20


def test_there_are_enough_lies() -> None:
    assert len(LIES) >= 36
    assert len({name for name, _, _ in LIES}) == len(LIES)


@pytest.mark.parametrize(
    ("message", "lie"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES]
)
def test_a_lie_is_refused(tmp_path: Path, message: str, lie: Lie) -> None:
    raw = raw_llama()
    lie(raw)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.encode())
    refused(path, message)


@pytest.mark.parametrize("size", [0, 3, 4, 23, 24, 30, 100, 500, 1000, 2000, 3000])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_llama().encode()[:size])
    refused(path, "")


def test_no_prefix_and_no_flipped_byte_of_the_header_crashes(tmp_path: Path) -> None:
    # whatever one wrong byte does, it gives a checkpoint or a CheckpointError
    data = raw_llama().encode()
    header = data.index(b"blk.0.attn_norm")
    path = tmp_path / "m.gguf"
    for position in range(0, header, 7):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        path.write_bytes(broken)
        try:
            open_gguf(path)
        except CheckpointError as error:
            assert str(path) in str(error)


def test_a_vocabulary_entry_that_is_not_text_is_refused(tmp_path: Path) -> None:
    raw = raw_llama()
    entries = strings(VOCAB - 1) + text(b"\xff\xfe")
    raw.put("tokenizer.ggml.tokens", ARRAY, array(STRING, entries, VOCAB))
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.encode())
    assert "tokens[47]" in refused(path, "not UTF-8")


def test_a_large_file_of_empty_strings_is_refused_without_reading_it(tmp_path: Path) -> None:
    # sparse: 200 MB of zeros are 25 million empty strings
    raw = RawGGUF(metadata=[(b"x", ARRAY, array(STRING, b"", 24_000_000))], alignment=1)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.encode())
    with path.open("r+b") as file:
        file.truncate(200 << 20)
    refused(path, "strings and nested arrays")


def test_a_large_array_of_numbers_is_refused_without_reading_it(tmp_path: Path) -> None:
    raw = RawGGUF(metadata=[(b"x", ARRAY, array(U8, b"", 2**33))], alignment=1)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.encode())
    with path.open("r+b") as file:
        file.truncate(2**33 + 1000)
    refused(path, "a header at most")


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_gguf(tmp_path / "absent.gguf")
