"""LoRA adapters as ``peft`` saves them: adapter_config.json and adapter_model.safetensors.

::

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight    [rank, inputs]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight    [outputs, rank]

Every field that would change the results is either served or refused by its name, and so is every
tensor: an adapter that is served in part would be a wrong answer without an error. Pickles are
never opened.

This module does not know how an adapter is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.architectures import ARCHITECTURES
from paceline.checkpoints.model.adapter import MODULES, AdapterFile, AdapterPair
from paceline.checkpoints.model.checkpoint import row_order
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.json_file import read_json_object
from paceline.checkpoints.weights.safetensors import (
    DTYPES,
    SafetensorsEntry,
    read_entries,
    values_of,
)
from paceline.errors import CheckpointError

__all__ = ["open_peft"]

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PICKLE: Final = "adapter_model.bin"
# fields that are read here, or that only training or the tensors' names depend on
_READ: Final = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern"}) | {
    "alpha_pattern", "fan_in_fan_out", "init_lora_weights", "target_modules", "modules_to_save",
    "base_model_name_or_path", "exclude_modules", "layers_to_transform", "layers_pattern",
    "task_type", "inference_mode", "revision", "auto_mapping", "lora_dropout", "peft_version",
    "megatron_config", "megatron_core", "runtime_config", "loftq_config", "eva_config",
    "corda_config", "bias", "lora_bias", "ensure_weight_tying",
    # of use_qalora, which is refused; peft saves it with every adapter
    "qalora_group_size",
}  # fmt: skip
# ways to begin training that leave the base model as it is; with others, such as pissa, the saved
# adapter is relative to a changed one
_KEEPS_BASE: Final = ("gaussian", "eva", "orthogonal")
_PREFIXES: Final = ("base_model.model.", "base_model.", "language_model.", "model.")
_NAME: Final = re.compile(
    r"layers\.(0|[1-9][0-9]{0,4})\.([a-z_.]+)\.lora_([AB])(?:\.default)?\.weight"
)


def open_peft(
    folder: Path,
    config: ModelConfig,
    max_rank: int | None = None,
    pause: Callable[[], None] = lambda: None,
) -> AdapterFile:
    """Open a folder for a model; calls ``pause`` after each small part of the work. Raises
    CheckpointError, naming the field or the tensor, for what is malformed, not supported, or does
    not fit the model."""
    raw = read_json_object(folder / _CONFIG)
    if raw is None:
        raise CheckpointError(f"{folder} has no {_CONFIG}, so it is no adapter")
    where = f"{folder / _CONFIG}"
    notes = _check_fields(raw, where)
    pause()
    entries = _entries(folder, pause)
    pause()
    found, left = _pairs(entries, pause)
    if left:
        raise CheckpointError(
            f"{folder}: {len(left)} tensors are not served, such as {', '.join(left[:3])}"
        )
    _check_targets(raw, found, where)
    transposed = bool(raw.get("fan_in_fan_out"))
    pairs: dict[tuple[int, str], AdapterPair] = {}
    for (layer, module), (a, b) in found.items():
        if a is None or b is None:
            whole, lacking = (a, "lora_B") if a is not None else (b, "lora_A")
            assert whole is not None
            raise CheckpointError(f"{folder}: {whole[0]} has no {lacking} next to it")
        shape = a[1].shape[::-1] if transposed else a[1].shape
        rank = shape[0] if shape else 0
        scale = _scale(raw, f"layers.{layer}.{module}", rank, where)
        pairs |= _split(config, layer, module, (a, b), scale, transposed=transposed)
        pause()
    return AdapterFile.of(folder, config, pairs, max_rank=max_rank, notes=notes, pause=pause)


def _check_fields(raw: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Refuse fields that would change the results and are not served; return notes for users."""
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {raw.get('peft_type')!r:.40} is not served")
    for name, value in raw.items():
        if name not in _READ and value not in (None, False, 0, "", [], {}):
            raise CheckpointError(f"{where}: {name}={value!r:.40} is not served")
    if raw.get("bias", "none") not in (None, "none"):
        raise CheckpointError(f"{where}: bias={raw['bias']!r:.40} is not served, only none")
    if raw.get("lora_bias"):
        raise CheckpointError(f"{where}: lora_bias={raw['lora_bias']!r:.40} is not served")
    begun = raw.get("init_lora_weights")
    if begun not in (None, True, False) and str(begun).lower() not in _KEEPS_BASE:
        raise CheckpointError(
            f"{where}: init_lora_weights={begun!r:.40} is not served, as it may have changed the "
            "base model in training: convert the adapter to one for the original model"
        )
    rank = raw.get("r")
    if type(rank) is not int or rank < 1:
        raise CheckpointError(f"{where}: r={rank!r:.40}, must be a whole number from 1 on")
    notes = []
    if raw.get("modules_to_save"):
        notes.append(f"modules_to_save={raw['modules_to_save']!r:.60}: no such tensors are there")
    if base := raw.get("base_model_name_or_path"):
        notes.append(f"made for {base!s:.80}")
    return tuple(notes)


def _entries(folder: Path, pause: Callable[[], None]) -> dict[str, SafetensorsEntry]:
    names = {path.name for path in folder.iterdir()}
    if _PICKLE in names and not names & {_WEIGHTS, f"{_WEIGHTS}.index.json"}:
        raise CheckpointError(
            f"{folder} has {_PICKLE} alone. Loading a pickle can run any code, so Paceline does "
            "not: save the adapter as safetensors (save_pretrained of peft 0.7 or later does)"
        )
    return read_entries(folder, _WEIGHTS, pause)


# name and place of A or B
_Half: TypeAlias = tuple[str, SafetensorsEntry] | None


def _pairs(
    entries: Mapping[str, SafetensorsEntry], pause: Callable[[], None]
) -> tuple[dict[tuple[int, str], list[_Half]], list[str]]:
    """Return A and B by layer and module, and the names of all other tensors."""
    pairs: dict[tuple[int, str], list[_Half]] = {}
    left = []
    for name, entry in entries.items():
        match = _NAME.fullmatch(_plain(name))
        if match is None or not _parts(match[2]) or entry.dtype not in DTYPES:
            left.append(name)
            continue
        half = pairs.setdefault((int(match[1]), match[2]), [None, None])
        place = "AB".index(match[3])
        if half[place] is not None:
            left.append(name)
        half[place] = name, entry
        pause()
    return pairs, left


def _plain(name: str) -> str:
    """Return a tensor's name from "layers." on, without the wrappers that it was saved under."""
    shorter = True
    while shorter:
        shorter = False
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name, shorter = name.removeprefix(prefix), True
    return name


def _parts(module: str) -> tuple[str, ...]:
    """Return the modules of MODULES that a module of a folder holds; () for others."""
    if module in MODULES:
        return (module,)
    for architecture in ARCHITECTURES.values():
        if parts := architecture.fused.get(module):
            return parts if set(parts) <= set(MODULES) else ()
    return ()


def _check_targets(
    raw: Mapping[str, Any], found: Mapping[tuple[int, str], object], where: str
) -> None:
    """Refuse a list of modules of which one has no tensor: it was not saved whole."""
    targets = raw.get("target_modules")
    if not isinstance(targets, list):
        return
    for target in targets:
        if not any(f".{module}".endswith(f".{target}") for _, module in found):
            raise CheckpointError(
                f"{where}: target_modules names {target!r:.60}, and no tensor served here is of it"
            )


def _scale(raw: Mapping[str, Any], name: str, rank: int, where: str) -> float:
    """Return the factor of a module's product."""
    wanted = _pattern(raw, "rank_pattern", name, raw["r"], where)
    if rank != wanted:
        raise CheckpointError(f"{where}: {name} has rank {rank}, r or rank_pattern says {wanted}")
    alpha = _pattern(raw, "alpha_pattern", name, raw.get("lora_alpha", 8), where)
    return float(alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank))


def _pattern(raw: Mapping[str, Any], field: str, name: str, value: Any, where: str) -> Any:
    """Return a number by ``peft``'s rule: the first pattern that matches the module's name."""
    patterns = raw.get(field) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{where}: {field}={patterns!r:.40} must be an object")
    for pattern, own in patterns.items():
        if _matches(pattern, name, f"{where}: {field}"):
            value = own
            break
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CheckpointError(f"{where}: {field}, or its default, is {value!r:.40}: no number")
    return value


def _matches(pattern: str, name: str, where: str) -> bool:
    # names and what they end in suffice for all patterns that are plain; others could run for ever
    plain = pattern.removeprefix("^")
    if re.fullmatch(r"[A-Za-z0-9_.\\]+", plain) is None:
        raise CheckpointError(f"{where} has the pattern {pattern!r:.60}: plain names are served")
    plain = plain.replace("\\.", ".")
    while plain.startswith(_PREFIXES):
        plain = _plain(plain)
    return name == plain if pattern.startswith("^") else f".{name}".endswith(f".{plain}")


def _split(
    config: ModelConfig,
    layer: int,
    module: str,
    pair: tuple[tuple[str, SafetensorsEntry], tuple[str, SafetensorsEntry]],
    scale: float,
    *,
    transposed: bool,
) -> dict[tuple[int, str], AdapterPair]:
    """Return a module's pair, or one for each that a fused module holds: they share A."""
    (a_name, a), (b_name, b) = pair
    a_shape, b_shape = (a.shape[::-1], b.shape[::-1]) if transposed else (a.shape, b.shape)
    parts, made, first = _parts(module), {}, 0
    keys, queries = (
        heads * config.head_dim
        for heads in (config.num_key_value_heads, config.num_attention_heads)
    )
    rows = {MODULES[0]: queries, MODULES[1]: keys, MODULES[2]: keys}
    for part in parts:
        shape, span = b_shape, slice(0, None)
        if len(parts) > 1 and len(b_shape) == 2:
            count = rows.get(part, config.intermediate_size)
            span, first = slice(first, first + count), first + count
            last = part == parts[-1]
            shape = (b_shape[0] - span.start if last else count, b_shape[1])
        order = row_order(config, f"model.layers.{layer}.{part}.weight")
        read = partial(_read, a, b, span, order, transposed)
        shapes = tuple(a_shape), tuple(shape)
        made[layer, part] = AdapterPair(layer, part, (a_name, b_name), shapes, scale, read)
    return made


def _read(
    a: SafetensorsEntry,
    b: SafetensorsEntry,
    rows: slice,
    order: NDArray[np.intp] | None,
    transposed: bool,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    left, right = values_of(a), values_of(b)
    if transposed:
        left, right = left.T, right.T
    right = right[rows]
    return left, right if order is None else right[order]
