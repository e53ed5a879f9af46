"""Quantised weights as ``quantization_config`` of a config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoints.weights.quantised import FP8, INSTEAD, MXFP4, Quantisation
from paceline.errors import CheckpointError

__all__ = ["quantisation_of"]


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """Return the quantisation that a config.json describes; None: it describes none.

    Raises:
        CheckpointError: an unsupported kind; the message names it and alternatives.
    """
    raw = config.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"quantization_config is {raw!r:.80}, must be an object")
    method = raw.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(raw)
    if method == "compressed-tensors":
        return _compressed(raw)
    if method == "gptq":
        return _gptq(raw)
    if method == "awq":
        return _awq(raw)
    if method == "mxfp4":
        return Quantisation(MXFP4, 4)
    raise CheckpointError(f"weights quantised by {method!r:.40} are not read: {INSTEAD}")


def _fp8(raw: Mapping[str, Any]) -> Quantisation:
    kind = raw.get("fmt", "e4m3")
    if kind != "e4m3":
        raise CheckpointError(f"FP8 of the kind {kind!r:.40} is not read, only e4m3: {INSTEAD}")
    block = raw.get("weight_block_size")
    if block is None:
        return Quantisation(FP8)
    if not isinstance(block, list) or len(block) != 2 or not all(_is_count(n) for n in block):
        raise CheckpointError(f"weight_block_size is {block!r:.80}, must be [rows, columns]")
    return Quantisation(FP8, block=(block[0], block[1]))


def _compressed(raw: Mapping[str, Any]) -> Quantisation:
    layout = raw.get("format")
    groups = raw.get("config_groups")
    if layout != "float-quantized" or not isinstance(groups, Mapping):
        raise CheckpointError(
            f"compressed-tensors of the format {layout!r:.40} is not read: {INSTEAD}"
        )
    if not groups:
        raise CheckpointError(
            f"config_groups is empty, so nothing says how weights are stored: {INSTEAD}"
        )
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        kind = weights if isinstance(weights, Mapping) else {}
        if (kind.get("num_bits"), kind.get("type")) != (8, "float"):
            raise CheckpointError(
                f"config_groups.{name}: weights of {kind.get('num_bits')!r:.20} bits, "
                f"{kind.get('type')!r:.20}, are not read: {INSTEAD}"
            )
    block = next(iter(groups.values()))["weights"].get("block_structure")
    return _fp8({"weight_block_size": block})


def _gptq(raw: Mapping[str, Any]) -> Quantisation:
    layout = "marlin" if raw.get("is_marlin_format") else raw.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"GPTQ in the format {layout!r:.40} is not read: {INSTEAD}")
    bits = raw.get("bits")
    if type(bits) is not int or bits not in (4, 8):
        raise CheckpointError(
            f"GPTQ of {bits!r:.20} bits is not read, only of the whole numbers 4 and 8: {INSTEAD}"
        )
    # the first version stores zeros minus one
    return Quantisation("GPTQ", bits, _group_size(raw), int(layout == "gptq"))


def _awq(raw: Mapping[str, Any]) -> Quantisation:
    layout = raw.get("version", "gemm")
    if str(layout).lower() != "gemm":
        raise CheckpointError(f"AWQ in the format {layout!r:.40} is not read: {INSTEAD}")
    bits = raw.get("bits", raw.get("w_bit"))
    if type(bits) is not int or bits != 4:
        raise CheckpointError(
            f"AWQ of {bits!r:.20} bits is not read, only of the whole number 4: {INSTEAD}"
        )
    if not raw.get("zero_point", True):
        raise CheckpointError(f"AWQ without zero points is not read: {INSTEAD}")
    return Quantisation("AWQ", 4, _group_size(raw))


def _group_size(raw: Mapping[str, Any]) -> int:
    size = raw.get("group_size", raw.get("q_group_size"))
    if size != -1 and not _is_count(size):
        raise CheckpointError(f"group_size is {size!r:.40}, must be -1 or a number of inputs")
    return int(size)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 31
