"""A twin of a model in four bits: the same function in 16 bits, on another grid.

A published four-bit file cannot show what rounding costs, since its weights lie on the grid
already. In the twin the dimensions of the residual sum, of each MLP and of each head's values are
permuted by a seed. Every output stays what it was but for rounding to 16 bits, while the groups of
32 weights that get one scale are others, so the twin is as hard to round as any 16-bit model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from numpy.typing import NDArray

__all__ = ["write_twin"]

_WRITTEN_ANEW: Final = ("general.alignment", "general.architecture", "general.file_type")
_ON_RESIDUAL: Final = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")


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
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in fields.items():
        if name.startswith("GGUF.") or name in _WRITTEN_ANEW:
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
