"""Which code computes, and in which formats: what was asked for, or what suits the machine and the
file best.

Nothing is timed: the same file on the same machine always gets the same formats, or answers would
change from start to start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paceline.backends.native import (
    DTYPES,
    KV_DTYPES,
    unavailable_reason,
    unsupported_reason,
    variants,
)
from paceline.checkpoints.config import ModelConfig
from paceline.core.errors import ConfigError

__all__ = ["Formats", "choose_formats"]

# the only kernels whose byte products are no faster than their float32 ones
_PLAIN: Final = "portable"
_BFLOAT16_PRODUCTS: Final = "avx512bf16"
# stored types of 16 bits and more; the others are GGUF's of 8 and fewer
_WIDE: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Formats:
    """What a model is computed with."""

    # "torch" or "native"
    compute: str
    # of weights
    dtype: str
    # of the KV cache
    kv_dtype: str
    # why, where something was left to choose; else ""
    why: str


def choose_formats(
    config: ModelConfig,
    *,
    compute: str,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    device: str,
    torch_dtype: Callable[[str], str],
) -> Formats:
    """Settle each of ``compute``, ``dtype`` and ``kv_dtype`` that is "auto".

    ``auto`` takes the native kernels where they can serve the model; then int8 weights, which pass
    the gate of docs/accuracy.md, where they are fast and the file itself stores 8 bits or fewer
    (whoever serves a file of 16 bits has not asked for rounding); else bfloat16 where the processor
    multiplies it, else float32. The KV cache is float32 beside float32 weights, else bfloat16.

    Args:
        device: "cpu" or what PyTorch calls another one.
        torch_dtype: what PyTorch takes for a name, "auto" among them; raises ConfigError for names
            it does not compute in. Called only where PyTorch is to compute.

    Raises ConfigError for names that do not exist and combinations that nothing computes.
    """
    if compute not in ("auto", "torch", "native"):
        raise ConfigError(f"compute must be auto, torch or native, got {compute!r}")
    if kv_dtype not in ("auto", *KV_DTYPES):
        raise ConfigError(
            f"kv_dtype {kv_dtype!r} is not supported: use auto, {', '.join(KV_DTYPES)}"
        )
    reasons: list[str] = []
    if compute == "auto":
        compute, why = _choose_compute(config, block_size, device)
        reasons.append(why)
    if compute == "native":
        reason = _native_refusal(config, block_size, device)
        if reason is not None:
            raise ConfigError(f"--compute native {reason}; --compute torch serves it")
    if dtype == "auto":
        if compute == "native":
            dtype, why = _native_dtype(config)
        else:
            dtype = torch_dtype("auto")
            why = _multiplies(dtype, device)
        reasons.append(why)
    elif compute == "native" and dtype not in DTYPES:
        raise ConfigError(f"--compute native computes in {', '.join(DTYPES)}, not {dtype}")
    elif compute == "torch":
        if dtype in DTYPES and dtype not in ("float32", "bfloat16"):
            raise ConfigError(
                f"--dtype {dtype} needs --compute native, and here PyTorch computes"
                + (f": {reasons[0]}" if reasons else "")
            )
        torch_dtype(dtype)
    if compute == "native":
        if kv_dtype == "auto":
            kv_dtype, why = _native_kv_dtype(dtype)
            reasons.append(why)
        return Formats(compute, dtype, kv_dtype, "; ".join(reasons))
    if kv_dtype not in ("auto", dtype):
        raise ConfigError(
            f"--kv-dtype {kv_dtype} needs --compute native: PyTorch keeps the KV cache in the "
            f"weights' {dtype}"
            + (f" (computed by PyTorch because {reasons[0]})" if reasons else "")
        )
    return Formats(compute, dtype, dtype, "; ".join(reasons))


def _native_kv_dtype(dtype: str) -> tuple[str, str]:
    if dtype in ("float32", "bfloat16"):
        return dtype, f"{dtype} in the KV cache as in the weights"
    return "bfloat16", "bfloat16 in the KV cache because int8 there would add to the weights' error"


def _native_refusal(config: ModelConfig, block_size: int, device: str) -> str | None:
    """Why the native path cannot serve this."""
    if device != "cpu":
        return f"runs on the CPU, not on {device}"
    reason = unavailable_reason() or unsupported_reason(config, block_size)
    return None if reason is None else f"cannot serve this: {reason}"


def _choose_compute(config: ModelConfig, block_size: int, device: str) -> tuple[str, str]:
    reason = _native_refusal(config, block_size, device)
    if reason is not None:
        return "torch", f"the native path {reason}"
    return "native", f"native kernels for {variants()[0]}"


def _native_dtype(config: ModelConfig) -> tuple[str, str]:
    best = variants()[0]
    if config.stored_dtype not in _WIDE and best != _PLAIN:
        return "int8", (
            "int8 because it passes the accuracy gate on SmolLM2-135M (docs/accuracy.md), "
            f"{best} multiplies bytes fastest, and the file itself stores weights as "
            f"{config.stored_dtype}"
        )
    dtype = "bfloat16" if best == _BFLOAT16_PRODUCTS else "float32"
    return dtype, _multiplies(dtype, "cpu")


def _multiplies(dtype: str, device: str) -> str:
    has = "multiplies" if dtype == "bfloat16" else "does not multiply"
    return f"{dtype} because {device} {has} bfloat16"
