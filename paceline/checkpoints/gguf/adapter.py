"""LoRA adapters in a GGUF file, as llama.cpp's ``convert_lora_to_gguf.py`` writes them.

::

    general.type=adapter, adapter.type=lora, adapter.lora.alpha
    blk.3.attn_q.weight.lora_a    [rank, inputs]
    blk.3.attn_q.weight.lora_b    [outputs, rank], rows as in a model's file

This module does not know how an adapter is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.gguf.checkpoint import deinterleave, name_in_layer
from paceline.checkpoints.gguf.config import find_architecture
from paceline.checkpoints.gguf.container import GGUFTensor, read_gguf
from paceline.checkpoints.gguf.data import GGUFData
from paceline.checkpoints.model.adapter import MODULES, AdapterFile, AdapterPair
from paceline.checkpoints.model.checkpoint import row_order
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import CheckpointError

__all__ = ["open_gguf_adapter"]

_ENDS: Final = (".lora_a", ".lora_b")
_SHOWN: Final = ("adapter.lora.task_name", "adapter.lora.prompt_prefix")


def open_gguf_adapter(
    path: Path,
    config: ModelConfig,
    max_rank: int | None = None,
    pause: Callable[[], None] = lambda: None,
) -> AdapterFile:
    """Open a file for a model; calls ``pause`` after each small part of the work. Raises
    CheckpointError, naming the key or the tensor, for what is malformed, not supported, or does not
    fit the model."""
    file = read_gguf(path)
    alpha = _alpha(file.metadata, path)
    architecture = find_architecture(file.metadata)
    interleaved = architecture is not None and architecture.gguf_interleaved
    data = GGUFData((path,))
    halves: dict[tuple[int, str], list[GGUFTensor | None]] = {}
    left = []
    for tensor in file.tensors.values():
        end = next((end for end in _ENDS if tensor.name.endswith(end)), None)
        found = None if end is None else name_in_layer(tensor.name.removesuffix(end), architecture)
        if end is None or found is None or found[1] not in MODULES:
            left.append(tensor.name)
        else:
            halves.setdefault(found, [None, None])[_ENDS.index(end)] = tensor
    if left:
        raise CheckpointError(
            f"{path}: {len(left)} tensors are not served, such as {', '.join(left[:3])}"
        )
    pairs = {}
    for (layer, module), (a, b) in halves.items():
        if a is None or b is None:
            whole, lacking = (a, "lora_b") if a is not None else (b, "lora_a")
            assert whole is not None
            raise CheckpointError(f"{path}: {whole.name} has no {lacking} next to it")
        rank = a.shape[0] if a.shape else 0
        read = partial(_read, data, a, b, config, module, interleaved)
        scale = alpha / rank if alpha and rank else 1.0
        shapes = a.shape, b.shape
        pairs[layer, module] = AdapterPair(layer, module, (a.name, b.name), shapes, scale, read)
        pause()
    shown = tuple(f"{key}={file.metadata[key]!s:.80}" for key in _SHOWN if key in file.metadata)
    return AdapterFile.of(path, config, pairs, max_rank=max_rank, notes=shown)


def _alpha(metadata: Mapping[str, Any], path: Path) -> float:
    """Return ``adapter.lora.alpha``; refuse files that are no LoRA adapters."""
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != wanted:
            raise CheckpointError(
                f"{path}: {key} is {metadata.get(key)!r:.40}, an adapter's is {wanted}"
            )
    for key in metadata:
        if key.startswith("adapter.alora"):
            raise CheckpointError(f"{path}: {key} is not served: the whole prompt is adapted here")
    alpha = metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, (int, float)):
        raise CheckpointError(f"{path}: adapter.lora.alpha is {alpha!r:.40}, must be a number")
    return float(alpha)


def _read(
    data: GGUFData,
    a: GGUFTensor,
    b: GGUFTensor,
    config: ModelConfig,
    module: str,
    interleaved: bool,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rows, name = data.values(b), f"model.layers.0.{module}.weight"
    order = row_order(config, name)
    if order is not None:
        rows = rows[order]
    elif interleaved:
        rows = deinterleave(config, name, rows)
    return data.values(a), rows
