"""The layers behind the pooled hidden state, which make the vector that a request gets.

These are a few products of one row, so numpy computes them in float32, on every compute path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.pooling import PoolingInfo, PoolingParams
from paceline.errors import ConfigError

__all__ = ["LAST_FUNCTIONS", "Dense", "PoolingHead"]

Vector = NDArray[np.float32]

_erf: Final = np.vectorize(math.erf, otypes=[np.float32])


def _normalize(x: Vector) -> Vector:
    length = float(np.linalg.norm(x))
    # a vector of zeros has no direction and is returned as it is
    return np.asarray(x / max(length, 1e-12), dtype=np.float32)


def _sigmoid(x: Vector) -> Vector:
    # exp of a negative number cannot overflow
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small), dtype=np.float32)


def _softmax(x: Vector) -> Vector:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum(), dtype=np.float32)


def _gelu(x: Vector) -> Vector:
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))), dtype=np.float32)


_FUNCTIONS: Final[dict[str, Callable[[Vector], Vector]]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "normalize": _normalize,
}
# functions allowed at the end
LAST_FUNCTIONS: Final = ("identity", "sigmoid", "softmax", "normalize")


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """``function(weight @ x + bias)``."""

    # [out, in]
    weight: NDArray[np.float32]
    # [out]
    bias: NDArray[np.float32] | None = None
    # a key of _FUNCTIONS
    function: str = "identity"

    def __call__(self, x: Vector) -> Vector:
        out = self.weight @ x
        if self.bias is not None:
            out = out + self.bias
        return _FUNCTIONS[self.function](out)


class PoolingHead:
    """Layers one after the other, then what the request asks for.

    Args:
        hidden_size: size of a hidden state.
        function: the last one, of LAST_FUNCTIONS.

    Raises:
        ConfigError: layers that do not fit.
    """

    def __init__(self, hidden_size: int, layers: Sequence[Dense], function: str) -> None:
        self._layers = tuple(layers)
        self._function = _FUNCTIONS[function]
        self.size = hidden_size
        for number, layer in enumerate(self._layers):
            rows, columns = layer.weight.shape
            if columns != self.size or (layer.bias is not None and layer.bias.shape != (rows,)):
                raise ConfigError(
                    f"layer {number} behind the model takes {columns} numbers and gets {self.size}"
                )
            self.size = rows

    def __call__(self, hidden: Vector, params: PoolingParams, info: PoolingInfo) -> Vector:
        """Return the vector of one request, from a hidden state [hidden_size]."""
        x = hidden
        for layer in self._layers:
            x = layer(x)
        if params.dimensions is not None:
            x = x[: params.dimensions]
        wanted = params.use_activation
        if info.use_activation if wanted is None else wanted:
            x = self._function(x)
        return np.ascontiguousarray(x, dtype="<f4")
