"""Tiny checkpoints for tests: valid ones by the public libraries, lying ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

# a Llama of 2 layers, 4 heads of 8, 2 key heads
HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, HEAD_DIM, VOCAB = 32, 64, 2, 4, 2, 8, 48

U8, I32, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10


def llama_tensors(
    *, qkv_bias: bool = False, qk_norm: bool = False, tied: bool = True
) -> dict[str, NDArray[np.float32]]:
    """Random weights under GGUF names, in GGUF's order of rows."""
    random = np.random.default_rng(7)

    def make(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape, dtype=np.float32)

    tensors = {"token_embd.weight": make(VOCAB, HIDDEN), "output_norm.weight": make(HIDDEN)}
    if not tied:
        tensors["output.weight"] = make(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        p = f"blk.{layer}"
        tensors[f"{p}.attn_norm.weight"] = make(HIDDEN)
        tensors[f"{p}.ffn_norm.weight"] = make(HIDDEN)
        for name, rows in (
            ("attn_q", HEADS * HEAD_DIM),
            ("attn_k", KEY_HEADS * HEAD_DIM),
            ("attn_v", KEY_HEADS * HEAD_DIM),
        ):
            tensors[f"{p}.{name}.weight"] = make(rows, HIDDEN)
            if qkv_bias:
                tensors[f"{p}.{name}.bias"] = make(rows)
            if qk_norm and name != "attn_v":
                tensors[f"{p}.{name}_norm.weight"] = make(HEAD_DIM)
        tensors[f"{p}.attn_output.weight"] = make(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{p}.ffn_gate.weight"] = make(INNER, HIDDEN)
        tensors[f"{p}.ffn_up.weight"] = make(INNER, HIDDEN)
        tensors[f"{p}.ffn_down.weight"] = make(HIDDEN, INNER)
    return tensors


def llama_metadata(arch: str = "llama") -> dict[str, Any]:
    """Keys of the tiny model, without a tokenizer."""
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KEY_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
    }


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    change: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[Any]] | None = None,
    quantise: gguf.GGMLQuantizationType | None = None,
    tensors_per_part: int = 0,
) -> Path:
    """Write a tiny model. ``change`` overrides metadata, None removes a key; ``quantise`` is the
    type of the layers' matrices; with ``tensors_per_part`` it is split over files, whose names
    follow from ``path``."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    metadata = {**llama_metadata(arch), **(change or {})}
    for key, value in metadata.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int32(key, value) if value < 0 else writer.add_uint64(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in (llama_tensors() if tensors is None else tensors).items():
        if quantise is not None and tensor.ndim == 2 and name.startswith("blk."):
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str | bytes, claim: int | None = None) -> bytes:
    """A GGUF string, whose length may lie."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if claim is None else claim) + data


def array(kind: int, payload: bytes, count: int) -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def scalar(kind: int, value: float) -> bytes:
    codes = {U8: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}
    return struct.pack(codes[kind], value)


@dataclass
class RawTensor:
    name: bytes
    # fastest first, as stored
    dims: tuple[int, ...]
    kind: int = 0
    offset: int = 0
    rank: int | None = None


@dataclass
class RawGGUF:
    """A GGUF file spelled out, so that each field can lie."""

    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_metadata: int | None = None
    # (key, type, encoded value)
    metadata: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    tensors: list[RawTensor] = field(default_factory=list)
    alignment: int = 32
    data: bytes = b""

    def put(self, key: str, kind: int, value: bytes) -> None:
        """Set one entry, in place of the one there was."""
        self.metadata = [entry for entry in self.metadata if entry[0] != key.encode()]
        self.metadata.append((key.encode(), kind, value))

    def encode(self) -> bytes:
        out = bytearray(self.magic + struct.pack("<I", self.version))
        tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        metadata = len(self.metadata) if self.num_metadata is None else self.num_metadata
        out += struct.pack("<QQ", tensors, metadata)
        for key, kind, value in self.metadata:
            out += text(key) + struct.pack("<I", kind) + value
        for tensor in self.tensors:
            rank = len(tensor.dims) if tensor.rank is None else tensor.rank
            out += text(tensor.name) + struct.pack("<I", rank)
            out += b"".join(struct.pack("<Q", dim) for dim in tensor.dims)
            out += struct.pack("<IQ", tensor.kind, tensor.offset)
        out += bytes(-len(out) % self.alignment)
        return bytes(out) + self.data


def raw_llama() -> RawGGUF:
    """The tiny model, valid, with a vocabulary, ready to be made to lie."""
    raw = RawGGUF()
    raw.put("general.architecture", STRING, text("llama"))
    for key, value in llama_metadata().items():
        kind = F32 if isinstance(value, float) else U32
        raw.put(key, kind, scalar(kind, value))
    raw.put("tokenizer.ggml.model", STRING, text("gpt2"))
    raw.put("tokenizer.ggml.tokens", ARRAY, array(STRING, strings(VOCAB), VOCAB))
    raw.put("tokenizer.ggml.token_type", ARRAY, array(I32, scalar(I32, 1) * VOCAB, VOCAB))
    raw.put("tokenizer.ggml.merges", ARRAY, array(STRING, b"", 0))
    raw.put("tokenizer.ggml.eos_token_id", U32, scalar(U32, 2))
    offset = 0
    for name, values in llama_tensors().items():
        raw.tensors.append(RawTensor(name.encode(), tuple(reversed(values.shape)), 0, offset))
        padded = values.tobytes() + bytes(-values.nbytes % 32)
        raw.data += padded
        offset += len(padded)
    return raw


def strings(count: int) -> bytes:
    return b"".join(text(f"t{index}") for index in range(count))


def joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(parts)
