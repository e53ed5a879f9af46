"""A matrix product with a fixed weight, prepared once for the machine it runs on, and the second
half of a layer made of them: a gated MLP, or a mixture of such experts.

This is one of the two seams for faster kernels (the other is ``attention``): everything else only
calls a ``Linear``.

On the CPU the weight is reordered by oneDNN into blocks when it is loaded. Against
``torch.nn.functional.linear`` on a 2-core AMD EPYC with AVX512-BF16 this takes 0.4 to 0.7 times
as long for 1 to 64 rows in bfloat16 and 0.3 to 0.8 times in float32, and it is never slower for
more. The reordered copy replaces the weight; it is not kept twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import torch

__all__ = [
    "MLP",
    "Adapt",
    "DenseLinear",
    "DenseMLP",
    "Linear",
    "PackedLinear",
    "SparseMLP",
    "make_linear",
]


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


_SWIGLU_ALPHA: Final = 1.702
# adds to columns of a product's output, from the last argument on, what adapters make of its input:
# module, input, output, first column
Adapt: TypeAlias = Callable[..., None]


class MLP(Protocol):
    """Map [rows, hidden] to [rows, hidden], in x's dtype, as a fresh tensor."""

    def __call__(self, x: torch.Tensor, adapt: Adapt | None = None) -> torch.Tensor:
        """``adapt`` adds what adapters make of a product's input; None: no row has one."""


class DenseMLP:
    """``down(activation(gate(x)) * up(x))``, or as ``ModelConfig.activation`` describes others.

    Args:
        gate_up: [hidden] -> [2 * intermediate]: gate, up.
        down: [intermediate] -> [hidden].
        activation: one of ``config.ACTIVATIONS``.
        limit: bound of "clamped_swiglu".
    """

    def __init__(
        self, gate_up: Linear, down: Linear, activation: str, limit: float = math.inf
    ) -> None:
        self._gate_up, self._down = gate_up, down
        self._activation, self._limit = activation, limit

    def __call__(self, x: torch.Tensor, adapt: Adapt | None = None) -> torch.Tensor:
        both = self._gate_up(x)
        if adapt is not None:
            adapt("mlp.gate_proj", x, both, 0)
            adapt("mlp.up_proj", x, both, both.shape[1] // 2)
        inner = self._gated(*both.chunk(2, dim=-1))
        out = self._down(inner)
        if adapt is not None:
            adapt("mlp.down_proj", inner, out, 0)
        return out

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self._activation == "clamped_swiglu":
            gate = gate.clamp(max=self._limit)
            up = up.clamp(-self._limit, self._limit).add_(1.0)
            return torch.sigmoid(gate * _SWIGLU_ALPHA).mul_(gate).mul_(up)
        if self._activation == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)
        return torch.nn.functional.silu(gate).mul_(up)


class SparseMLP:
    """The ``chosen`` experts that the router scores highest for a row, weighted by its softmax.

    The router is computed in float32: in bfloat16 its rounding would choose other experts.

    Args:
        router: [experts, hidden].
        bias: [experts], added to the router's scores; None: there is none.
        normalise: the weights of the chosen experts are divided by their sum.
    """

    def __init__(
        self,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        experts: Sequence[MLP],
        chosen: int,
        normalise: bool,
    ) -> None:
        self._router = router.float()
        self._bias = None if bias is None else bias.float()
        self._experts = experts
        self._chosen, self._normalise = chosen, normalise

    def __call__(self, x: torch.Tensor, adapt: Adapt | None = None) -> torch.Tensor:
        # no adapter adds to experts: those that would are refused
        scores = torch.nn.functional.linear(x.float(), self._router, self._bias)
        weights, experts = scores.softmax(-1).topk(self._chosen, dim=-1)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # each expert runs once, for all rows that chose it
        for expert in sorted(set(experts.flatten().tolist())):
            rows, ranks = (experts == expert).nonzero(as_tuple=True)
            given = self._experts[expert](x[rows]).float() * weights[rows, ranks, None]
            out.index_add_(0, rows, given)
        return out.to(x.dtype)
