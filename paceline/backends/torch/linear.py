"""A matrix product with a fixed weight, prepared once for the machine it runs on.

This is one of the two seams for faster kernels (the other is ``attention``): everything else only
calls a ``Linear``.

On the CPU the weight is reordered by oneDNN into blocks when it is loaded. Against
``torch.nn.functional.linear`` on a 2-core AMD EPYC with AVX512-BF16 this takes 0.4 to 0.7 times
as long for 1 to 64 rows in bfloat16 and 0.3 to 0.8 times in float32, and it is never slower for
more. The reordered copy replaces the weight; it is not kept twice.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["DenseLinear", "Linear", "PackedLinear", "make_linear"]


class Linear(Protocol):
    """``y = x @ weight.T + bias``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, in_features] to [rows, out_features], in x's dtype, as a fresh tensor."""


class DenseLinear:
    """A product with the weight as it is, [out_features, in_features]; works everywhere."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A product with the weight in oneDNN's blocked layout; float32 and bfloat16 on CPUs only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return result


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the fastest Linear for this weight's device and dtype."""
    return PackedLinear(weight, bias) if _packs(weight) else DenseLinear(weight, bias)
