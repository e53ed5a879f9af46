"""A twin of a model in four bits: the same function in 16 bits, on another grid.

A published four-bit file cannot show what rounding costs, since its weights lie on the grid
already. In the twin the dimensions of the residual sum, of each MLP and of each head's values are
permuted by a seed. Every output stays what it was but for rounding to 16 bits, while the groups of
32 weights that get one scale are others, so the twin is as hard to round as any 16-bit model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from numpy.typing import NDArray

__all__ = ["begin_file", "end_file", "mix", "widen", "write_twin"]

_WRITTEN_ANEW: Final = ("general.alignment", "general.architecture", "general.file_type")
# weights of a block of K kinds
_BLOCK: Final = 256
# of the mixture, and those that a token takes
_EXPERTS: Final = 4
_USED: Final = 2
_ON_RESIDUAL: Final = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")


def begin_file(
    reader: gguf.GGUFReader, target: Path, changed: Mapping[str, object] | None = None
) -> gguf.GGUFWriter:
    """Return a writer of a file in float16 with the keys of another, but those ``changed``."""
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _WRITTEN_ANEW:
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            value = (changed or {}).get(name, field.contents())
            writer.add_key_value(name, value, kind, sub_type=sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    return writer


def end_file(writer: gguf.GGUFWriter) -> None:
    """Write what the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_twin(source: Path, target: Path, seed: int = 1) -> None:
    """Write the twin of a GGUF file of the llama architecture, matrices in float16."""
    reader = gguf.GGUFReader(source)
    fields = reader.fields
    config = {
        name: int(fields[f"llama.{name}"].contents())
        for name in (
            "embedding_length", "feed_forward_length", "block_count", "attention.head_count",
            "attention.head_count_kv",
        )
    }  # fmt: skip
    heads, kv_heads = config["attention.head_count"], config["attention.head_count_kv"]
    head_dim = config["embedding_length"] // heads
    random = np.random.default_rng(seed)
    residual = random.permutation(config["embedding_length"])
    layers, width = config["block_count"], config["feed_forward_length"]
    inner = [random.permutation(width) for _ in range(layers)]
    values = [
        np.stack([random.permutation(head_dim) for _ in range(kv_heads)]) for _ in range(layers)
    ]
    writer = begin_file(reader, target)
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name):
            layer, part = int(match[1]), match[2]
            weight = _permuted(
                weight, part, residual, inner[layer], values[layer], heads // kv_heads
            )
        else:
            weight = weight[..., residual]
        writer.add_tensor(
            tensor.name,
            np.ascontiguousarray(weight, dtype=np.float32 if weight.ndim == 1 else np.float16),
        )
    end_file(writer)


def _permuted(
    weight: NDArray[np.float32],
    part: str,
    residual: NDArray[np.int64],
    inner: NDArray[np.int64],
    values: NDArray[np.int64],
    group: int,
) -> NDArray[np.float32]:
    if part.endswith("_norm"):
        return weight[residual]
    if part in _ON_RESIDUAL:
        weight = weight[:, residual]
    head_dim = values.shape[1]
    if part == "attn_v":
        by_head = weight.reshape(len(values), head_dim, -1)
        return np.take_along_axis(by_head, values[..., None], 1).reshape(weight.shape)
    if part in ("ffn_gate", "ffn_up"):
        return weight[inner]
    if part == "ffn_down":
        return weight[residual][:, inner]
    if part == "attn_output":
        # ``group`` heads of queries, next to each other, read one head of values
        shared = weight.reshape(len(weight), -1, group, head_dim)
        moved = [shared[:, head][..., values[head]] for head in range(len(values))]
        return np.stack(moved, 1).reshape(weight.shape)[residual]
    return weight


def widen(source: Path, target: Path) -> None:
    """Write a GGUF file of the llama architecture in float16 whose rows are whole blocks of K kinds
    and whose outputs are the same: columns of zeros, heads whose values are zero, and norms for a
    mean that counts the zeros. Raises ValueError where that takes no whole number of KV heads."""
    reader = gguf.GGUFReader(source)
    keys = ("embedding_length", "attention.head_count", "attention.head_count_kv")
    hidden, heads, kv_heads = (int(reader.fields[f"llama.{key}"].contents()) for key in keys)
    head_dim, group = hidden // heads, heads // kv_heads
    wide = -(-hidden // _BLOCK) * _BLOCK
    more = wide // head_dim
    if more * head_dim != wide or more % group:
        raise ValueError(f"{more} heads of {head_dim} in groups of {group} are not {wide} columns")
    changed = dict(zip((f"llama.{key}" for key in keys), (wide, more, more // group), strict=True))
    rows = {"attn_q": wide, "attn_k": wide // group, "attn_v": wide // group}
    rows |= {"attn_output": wide, "ffn_down": wide}
    writer = begin_file(reader, target, changed)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            norm = np.zeros(wide, dtype=np.float32)
            norm[:hidden] = values * math.sqrt(hidden / wide)
            writer.add_tensor(tensor.name, norm)
            continue
        part = tensor.name.removesuffix(".weight").split(".")[-1]
        columns = wide if values.shape[1] == hidden else values.shape[1]
        out = np.zeros((rows.get(part, len(values)), columns), dtype=np.float16)
        out[: len(values), : values.shape[1]] = values
        writer.add_tensor(tensor.name, out)
    end_file(writer)


def mix(source: Path, target: Path, seed: int = 2) -> None:
    """Write a mixture of experts in float16 with the outputs of ``source``, a GGUF file of the
    llama architecture without experts. Each expert is the layer's MLP with its inner dimensions
    permuted, so all give the same but none is rounded as another is, and a router of random weights
    chooses."""
    reader, random = gguf.GGUFReader(source), np.random.default_rng(seed)
    keys = ("feed_forward_length", "embedding_length")
    inner, hidden = (int(reader.fields[f"llama.{key}"].contents()) for key in keys)
    writer, orders = begin_file(reader, target), dict[str, list[NDArray[np.int64]]]()
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(_USED)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        layer, part = (["", "", *tensor.name.split(".")])[-3:-1]
        if layer not in orders:
            orders[layer] = [random.permutation(inner) for _ in range(_EXPERTS)]
        if part in ("ffn_gate", "ffn_up", "ffn_down"):
            axis = 1 if part == "ffn_down" else 0
            values = np.stack([np.take(values, order, axis) for order in orders[layer]])
            name = tensor.name.replace(part, f"{part}_exps")
        else:
            name = tensor.name
        writer.add_tensor(name, values.astype(np.float32 if values.ndim == 1 else np.float16))
        if part == "ffn_norm":
            router = random.standard_normal((_EXPERTS, hidden), dtype=np.float32)
            writer.add_tensor(name.replace(part, "ffn_gate_inp"), router / math.sqrt(hidden))
    end_file(writer)
