"""Choice of the compute path and the formats: as asked for, or as suits machine and file best.

Nothing is timed: the same file on the same machine always gets the same formats, or answers would
change from start to start. Figures measured beforehand are in a table (``levels``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.backends.loading.levels import Measured, fastest, measured, preferred
from paceline.backends.machine.cpu import NO_TORCH, has_torch
from paceline.backends.native import (
    BLOCKS,
    DTYPES,
    KEPT,
    KV_DTYPES,
    OWN_BITS,
    unavailable_reason,
    unsupported_reason,
    variants,
)
from paceline.checkpoints.gguf.container import SIZES, GGUFType
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import ConfigError
from paceline.renamed import is_now

__all__ = ["Formats", "choose_formats", "stored_bits", "usable_levels"]

# GGUF's own bytes, Q8_0, spend 8.5 bits a weight with their scales
_BYTES: Final = 8.5
_SIXTEEN: Final = 16.0
# KV cache formats to pair with weight formats: a file of 16 bits has not asked for rounding
_KV_BESIDE: Final = {
    "q4": ("bfloat16", "int8"),
    OWN_BITS: ("bfloat16", "int8"),
    "int8": ("bfloat16", "int8"),
    "bfloat16": ("bfloat16",),
    "float32": ("float32",),
}
# format of 4 bits that index a table: q4's blocks cannot hold them, kernels of their own can
_LOOKED_UP: Final = "MXFP4"
# levels with an instruction for products of bytes (``Traits.narrow_sums``): on others such kernels
# take up to three times as long as int8
_BYTE_PRODUCTS: Final = frozenset({"avxvnni", "avx512", "avx512bf16"})
# bits in quantised folders, without scales, which are a few hundredths of a bit
_STORED_BITS: Final = {
    "float64": 64.0, "float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "FP8": 8.0, "INT8": 8.0,
    "INT4": 4.0, "MXFP4": 4.25,
}  # fmt: skip
# weight formats that hold a file's numbers exactly, by the file's format
_UNROUNDED: Final = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Formats:
    """Compute path and formats of a model."""

    # "torch" or "native"
    compute: str
    # format of the weights
    dtype: str
    # format of the KV cache
    kv_dtype: str
    # reason, where something was left to choose; else ""
    why: str
    # the level of native kernels; None where PyTorch computes
    isa: str | None = None


def choose_formats(
    config: ModelConfig,
    *,
    compute: str,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    device: str,
    torch_dtype: Callable[[str], str],
    isa: str | None = None,
    pooled: bool = False,
    planned: bool = False,
) -> Formats:
    """Settle each of ``compute``, ``dtype`` and ``kv_dtype`` that is "auto".

    ``auto`` takes the native kernels where they can serve the model. Of the formats that suit the
    file it takes the fastest of the table in ``levels`` that pass the gate of
    docs/understand/accuracy.md and give a request the same answer in any batch
    (docs/operate/processors.md). Of the levels that run here it takes the best, or a lesser one
    that was measured to be faster.

    Args:
        device: "cpu" or PyTorch's name of another one.
        torch_dtype: resolves a name, also "auto", to PyTorch's format; raises ConfigError for
            formats that PyTorch does not compute in. Called only where PyTorch is to compute.
        isa: the level of instructions that native kernels use; None: PACELINE_ISA's, or the
            fastest that runs here.
        pooled: hidden states are wanted: vectors are compared in all their digits, so ``auto``
            rounds no weights that the file does not.
        planned: nothing will be computed, so PyTorch need not be installed.

    Raises ConfigError for unknown names and for combinations that no compute path supports.
    """
    if renamed := is_now([dtype], (OWN_BITS,)):
        raise ConfigError(f"--dtype {renamed}")
    if compute not in ("auto", "torch", "native"):
        raise ConfigError(f"compute must be auto, torch or native, got {compute!r}")
    if kv_dtype not in ("auto", *KV_DTYPES):
        raise ConfigError(
            f"kv_dtype {kv_dtype!r} is not supported: use auto, {', '.join(KV_DTYPES)}"
        )
    reasons: list[str] = []
    levels = _levels_for(isa, config, dtype)
    if compute == "auto":
        compute, why = _choose_compute(config, block_size, device, levels, isa is not None)
        reasons.append(why)
    if compute == "native":
        reason = _native_refusal(config, block_size, device)
        if reason is not None:
            raise ConfigError(f"--compute native {reason}; --compute torch serves it")
        formats = _of_native(config, dtype, kv_dtype, levels, reasons)
        kept = _UNROUNDED.get(config.stored_dtype, formats.dtype)
        if pooled and dtype == "auto" and kept != formats.dtype:
            kv = _KV_BESIDE[kept][0] if kv_dtype == "auto" else kv_dtype
            why = f"native, in {kept} as the file is not rounded either"
            return Formats(compute, kept, kv, why, _levels_for(isa, config, kept)[0])
        return formats
    if isa is not None:
        raise ConfigError(
            f"--isa {isa} chooses native kernels, and here PyTorch computes"
            + (f": {reasons[0]}" if reasons else "")
        )
    if not planned and not has_torch():
        why = reasons[0] if reasons else "--compute torch was asked for"
        raise ConfigError(f"{why}, and {NO_TORCH}")
    return _of_torch(dtype, kv_dtype, device, torch_dtype, reasons)


def _of_native(
    config: ModelConfig, dtype: str, kv_dtype: str, levels: Sequence[str], reasons: list[str]
) -> Formats:
    """Settle the formats of the native path, chosen for ``reasons``."""
    if dtype not in ("auto", *DTYPES, OWN_BITS):
        known = ", ".join((*DTYPES, OWN_BITS))
        raise ConfigError(f"--compute native computes in {known}, not {dtype}")
    if dtype == OWN_BITS and config.stored_dtype not in BLOCKS:
        raise ConfigError(
            f"--dtype {OWN_BITS} keeps blocks of {', '.join(BLOCKS)} in their bits, and this "
            f"file is of {config.stored_dtype}: leave it out, or name int8 or bfloat16"
        )
    if "auto" in (dtype, kv_dtype):
        dtype, kv_dtype, why = _native_formats(config, dtype, kv_dtype, levels)
        reasons = [*reasons, why]
    return Formats("native", dtype, kv_dtype, "; ".join(reasons), levels[0])


def _of_torch(
    dtype: str, kv_dtype: str, device: str, torch_dtype: Callable[[str], str], reasons: list[str]
) -> Formats:
    """Settle the formats of the PyTorch path, chosen for ``reasons``: one for everything."""
    if dtype == "auto":
        dtype = torch_dtype("auto")
        reasons = [*reasons, _multiplies(dtype, device)]
    else:
        if dtype in (*DTYPES, OWN_BITS) and dtype not in ("float32", "bfloat16"):
            raise ConfigError(
                f"--dtype {dtype} needs --compute native, and here PyTorch computes"
                + (f": {reasons[0]}" if reasons else "")
            )
        torch_dtype(dtype)
    if kv_dtype not in ("auto", dtype):
        raise ConfigError(
            f"--kv-dtype {kv_dtype} needs --compute native: PyTorch keeps the KV cache in the "
            f"weights' {dtype}"
            + (f" (computed by PyTorch because {reasons[0]})" if reasons else "")
        )
    return Formats("torch", dtype, dtype, "; ".join(reasons))


def usable_levels(isa: str | None) -> tuple[str, ...]:
    """Return the usable levels of the native kernels, best first; () without the library.

    Args:
        isa: the highest of them; None: the best that runs here.

    Raises ConfigError where ``isa`` does not run here, naming those that do.
    """
    levels = variants()
    if isa is None or not levels:
        return levels
    if isa not in levels:
        raise ConfigError(f"--isa {isa} does not run here; these do: {', '.join(levels)}")
    return levels[levels.index(isa) :]


def _levels_for(isa: str | None, config: ModelConfig, dtype: str) -> tuple[str, ...]:
    """Return ``usable_levels``; unless a level was named, begin with the one that is fastest with
    formats that suit the file. The first computes; the others only lend figures (``measured``)."""
    levels = usable_levels(isa)
    if isa is not None or os.environ.get("PACELINE_ISA"):
        return levels

    def suits(level: str, pair: Measured) -> bool:
        if pair.kv not in _KV_BESIDE[pair.weights]:
            return False
        if dtype != "auto":
            return pair.weights == _like(dtype)
        return pair.passes and pair.steady and _suits(pair.weights, config.stored_dtype, level)

    return preferred(levels, suits)


def _native_refusal(config: ModelConfig, block_size: int, device: str) -> str | None:
    """Return why the native path cannot serve this model, or None."""
    if device != "cpu":
        return f"runs on the CPU, not on {device}"
    reason = unavailable_reason() or unsupported_reason(config, block_size)
    return None if reason is None else f"cannot serve this: {reason}"


def _choose_compute(
    config: ModelConfig, block_size: int, device: str, levels: Sequence[str], named: bool
) -> tuple[str, str]:
    reason = _native_refusal(config, block_size, device)
    if reason is not None:
        return "torch", f"the native path {reason}"
    slower = [level for level in usable_levels(None) if level not in levels]
    faster = f" (measured to be faster than {', '.join(slower)})" if slower and not named else ""
    return "native", f"native kernels for {levels[0]}{faster}"


def _native_formats(
    config: ModelConfig, dtype: str, kv_dtype: str, levels: Sequence[str]
) -> tuple[str, str, str]:
    """Return the formats of weights and KV cache where they are "auto", and the reason."""
    used = levels[0]
    caches = _KV_BESIDE.get(dtype, ())
    if len(caches) == 1:
        return dtype, caches[0], f"{caches[0]} in the KV cache as in the weights"
    level, pairs = measured(levels)
    proxy = "" if level == used else f" (whose figures stand for {used}'s)"
    because = f"because that is the fastest on {level}{proxy} of what passes the accuracy gate"
    # a cache format that was asked for does not change which weights are best
    pairs = tuple(pair for pair in pairs if pair.kv in _KV_BESIDE[pair.weights])
    if dtype != "auto":
        # these weights were asked for, whatever the gate says of them
        of_kind = [pair for pair in pairs if pair.weights == _like(dtype)]
        if not of_kind:
            why = f"because {level} was not measured with {dtype} weights"
            return dtype, caches[0], f"{caches[0]} in the KV cache {why}"
        choice = fastest([pair for pair in of_kind if pair.passes] or of_kind)
        why = f"{choice.kv} in the KV cache {because} beside {dtype} weights "
        return dtype, choice.kv, f"{why}(docs/operate/processors.md)"
    stored = config.stored_dtype
    found = [
        pair for pair in pairs if pair.passes and pair.steady and _suits(pair.weights, stored, used)
    ]
    if not found:
        raise ConfigError(
            f"nothing that was measured on {level} and passes the accuracy gate suits weights "
            f"stored as {stored}: name formats with --dtype and --kv-dtype "
            "(docs/operate/processors.md)"
        )
    choice = fastest(found)
    weights = choice.weights
    if weights == "q4" and stored == _LOOKED_UP:
        # its products take as long as q4's, and it keeps the file's own numbers
        weights = OWN_BITS
        because += " (q4 stands for these weights, which were not measured)"
    what = f"{weights} weights by default for this file{_finer(weights)},"
    if kv_dtype == "auto":
        kv_dtype = choice.kv
        what += f" {kv_dtype} in the KV cache,"
    suits = f"in any batch alike and suits weights stored as {stored} (docs/operate/processors.md)"
    return weights, kv_dtype, f"{what} {because} {suits}"


def _like(dtype: str) -> str:
    """Return the measured weight format whose figures stand for ``dtype``."""
    return "q4" if dtype == OWN_BITS else dtype


def _finer(weights: str) -> str:
    """Return the hint, for users, which flag rounds the file's values less; else ""."""
    finer = {
        # int8 would round the 4 bits that q4 keeps
        "q4": "bfloat16 or float32",
        OWN_BITS: "bfloat16 or float32",
        "int8": "bfloat16 or float32",
        "bfloat16": "float32",
    }
    return f" (--dtype {finer[weights]} rounds less)" if weights in finer else ""


def _suits(weights: str, stored: str, level: str) -> bool:
    """Return whether "auto" may take ``weights`` for a file stored as ``stored``, on ``level``.

    They must not round more than the file does, but 16 bits suit any file; and a file of at most 16
    bits never gets twice its bits. For 4 bits that index a table, q4 stands in."""
    if weights == "q4":
        return stored in KEPT or (stored == _LOOKED_UP and level in _BYTE_PRODUCTS)
    bits = stored_bits(stored)
    if weights == "int8":
        return bits <= _BYTES
    return weights == "bfloat16" or bits > _SIXTEEN


def stored_bits(stored_dtype: str) -> float:
    """Return the bits per weight, scales included.

    Args:
        stored_dtype: as ``ModelConfig.stored_dtype``, e.g. "bfloat16" (16) or "Q4_1" (5).

    Raises ValueError for a name that is neither a plain dtype nor one of GGUF's types nor one of
    ``quantised``.
    """
    if stored_dtype in _STORED_BITS:
        return _STORED_BITS[stored_dtype]
    try:
        values, size = SIZES[GGUFType[stored_dtype]]
    except KeyError:
        raise ValueError(f"{stored_dtype!r} is not a type in which weights are stored") from None
    return 8.0 * size / values


def _multiplies(dtype: str, device: str) -> str:
    has = "multiplies" if dtype == "bfloat16" else "does not multiply"
    return f"{dtype} because {device} {has} bfloat16"
