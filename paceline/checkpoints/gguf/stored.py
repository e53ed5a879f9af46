"""Number of bits that a file spends on a weight."""

from __future__ import annotations

from typing import Final

from paceline.checkpoints.gguf.types import SIZES, GGUFType

__all__ = ["stored_bits"]

# bits in quantised folders, without scales, which are a few hundredths of a bit
_PLAIN: Final = {
    "float64": 64.0, "float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "FP8": 8.0, "INT8": 8.0,
    "INT4": 4.0, "MXFP4": 4.25,
}  # fmt: skip


def stored_bits(stored_dtype: str) -> float:
    """Return the bits per weight, scales included.

    Args:
        stored_dtype: as ``ModelConfig.stored_dtype``, e.g. "bfloat16" (16) or "Q4_1" (5).

    Raises ValueError for a name that is neither a plain dtype nor one of GGUF's types nor one of
    ``quantised``.
    """
    if stored_dtype in _PLAIN:
        return _PLAIN[stored_dtype]
    try:
        values, size = SIZES[GGUFType[stored_dtype]]
    except KeyError:
        raise ValueError(f"{stored_dtype!r} is no type that weights are stored as") from None
    return 8.0 * size / values
