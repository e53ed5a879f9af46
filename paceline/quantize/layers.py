"""Rounding of a model layer by layer, each on the inputs that the rounded layers before it give.

Two streams of a calibration text run through the model: one through the weights as they are, one
through the rounded ones. A matrix is rounded when the second stream reaches it, so its errors are
weighed by the inputs that it will see when it serves. The outputs that it should give are those of
the first stream, so it also makes up for some of what earlier layers lost (as in GPTAQ: Li et al.
2025, arXiv 2504.02692). One layer is in memory at a time, in float32, and of the layer as it was
the inputs of its products, or their outputs where these are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from paceline.backends.machine.heap import trim_heap
from paceline.backends.torch.linear import DenseLinear, Linear
from paceline.checkpoints.gguf.container import GGUFType
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.errors import CheckpointError
from paceline.quantize.rounding import as_blocks, levels_of, round_matrix, round_nearest
from paceline.quantize.streams import Streams

__all__ = ["LayerRounding", "RoundedTensor"]

# added to the diagonal of the inputs' second moments, as a share of its mean, where a matrix makes
# up for earlier layers. It is more than for rounding, since what is made up for is learned from the
# text: with 0.05, 0.3 and no such correction at all the KL was 0.051, 0.043 and 0.053 (ten layers
# rounded, on sources of the standard library, which no benchmark judges by)
_CORRECTION_DAMPING: Final = 0.3
# so that inputs that are all 0 have a factor too
_LEAST: Final = 1e-12
# tokens for each of its columns that a matrix is rounded on: with fewer it would fit these tokens,
# which happens to experts that are rarely chosen
_LEAST_TOKENS: Final = 0.25


# most tokens, but for one window, that run through a layer as it was at once
_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True, eq=False)
class RoundedTensor:
    """A matrix in few bits."""

    kind: GGUFType
    # [rows, bytes of a row]
    blocks: NDArray[np.uint8]


class _Noting:
    """A product that keeps the inputs of each of its calls, or its outputs without the bias where
    these are fewer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def see(self, x: torch.Tensor) -> Linear:
        # without a norm before it a product reads the stream itself, which changes
        self._inputs.append(x.clone())
        return DenseLinear(self._weight, self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._weight) >= x.shape[1]:
            return self.see(x)(x)
        out = torch.nn.functional.linear(x, self._weight)
        self._outputs.append(out)
        return out.clone() if self._bias is None else out + self._bias

    def free(self) -> None:
        """Forget the weight, once the layer has run."""
        del self._weight

    def shift(self, weight: torch.Tensor, x: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        """Return ``weight``'s outputs on the inputs that were kept less those on ``x``, times
        ``x``: [rows, columns]. ``moments``: ``x^T x``."""
        kept = self._outputs or self._inputs
        parts = zip(kept, torch.split(x, [len(part) for part in kept]), strict=True)
        if self._outputs:
            of_outputs = (weight @ moments).neg_()
            for outputs, part in parts:
                of_outputs.addmm_(outputs.t(), part)
            return of_outputs
        cross = moments.neg()
        for inputs, part in parts:
            cross.addmm_(inputs.t(), part)
        return weight @ cross


class _RoundedLater:
    """A product whose weight is rounded when its inputs are there."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rounded: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._weight, self._bias, self._rounded = weight, bias, rounded

    def see(self, x: torch.Tensor) -> Linear:
        weight = self._rounded(self._weight, x)
        # it runs once
        del self._weight
        return DenseLinear(weight, self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.see(x)(x)


class LayerRounding:
    """The two streams between layers.

    Args:
        windows: token ids of the text, [windows, length].
        kinds: type by matrix of a layer; one that is missing keeps its values.
    """

    def __init__(
        self, checkpoint: Checkpoint, windows: torch.Tensor, kinds: Mapping[str, GGUFType]
    ) -> None:
        self._checkpoint, self._kinds = checkpoint, kinds
        self._length = windows.shape[1]
        self._streams = Streams(checkpoint, self._length)
        # [tokens, hidden] in float32
        self.exact = self._streams.embed(windows)
        self.rounded = self.exact.clone()

    @torch.inference_mode()
    def round_layer(self, index: int) -> tuple[dict[str, RoundedTensor], float]:
        """Run both streams through a layer, and return its matrices in few bits, by name, and the
        squared error of the rounded stream behind it, over the squares of the exact one.

        Raises CheckpointError for weights or activations that are not finite.
        """
        found: dict[str, RoundedTensor] = {}
        unseen: dict[tuple[str, ...], torch.Tensor] = {}
        exact: dict[tuple[str, ...], _Noting] = {}

        def noting(
            names: tuple[str, ...], weight: torch.Tensor, bias: torch.Tensor | None
        ) -> Linear:
            # an expert sees other rows in the two streams
            if ".experts." in names[0] or f"{names[0]}.weight" not in self._kinds:
                return DenseLinear(weight, bias)
            exact[names] = _Noting(weight, bias)
            return exact[names]

        def later(
            names: tuple[str, ...], weight: torch.Tensor, bias: torch.Tensor | None
        ) -> Linear:
            if f"{names[0]}.weight" not in self._kinds:
                return DenseLinear(weight, bias)

            unseen[names] = weight

            def rounded(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
                del unseen[names]
                return self._round(names, weight, x, exact.pop(names, None), found)

            return _RoundedLater(weight, bias, rounded)

        streams = self._streams
        with streams.layer(index, noting) as layer:
            # the rounded stream cannot, as a matrix is rounded on the inputs of all windows
            for part in torch.split(self.exact, max(1, _TOKENS // self._length) * self._length):
                streams.run(index, layer, part)
        del layer
        for product in exact.values():
            product.free()
        with streams.layer(index, later) as layer:
            streams.run(index, layer, self.rounded)
        # experts that no token of the text chose
        for names, weight in unseen.items():
            self._check_finite(names, weight)
            kind = self._kinds[f"{names[0]}.weight"]
            self._add(names, _in_bits(kind, weight, None)[1], found)
        lost = (self.rounded - self.exact).square().sum() / self.exact.square().sum()
        if not bool(torch.isfinite(lost)):
            raise CheckpointError(f"{self._checkpoint.path}: layer {index} gives values that are "
                                  "not finite")  # fmt: skip
        return found, float(lost)

    def _round(
        self,
        names: tuple[str, ...],
        weight: torch.Tensor,
        x: torch.Tensor,
        exact: _Noting | None,
        found: dict[str, RoundedTensor],
    ) -> torch.Tensor:
        """Round the matrices of one product, add them to ``found``, and return their values."""
        kind = self._kinds[f"{names[0]}.weight"]
        moments, target = x.t() @ x, weight
        self._check_finite(names, weight, moments)
        if exact is not None:
            shift = exact.shift(weight, x, moments)
            del exact
            diagonal = moments.diagonal()
            before = diagonal.clone()
            diagonal.add_(diagonal.mean() * _CORRECTION_DAMPING + _LEAST)
            factor = torch.linalg.cholesky(moments)
            diagonal.copy_(before)
            # two solutions, as ``cholesky_solve`` copies the factor
            half = torch.linalg.solve_triangular(factor, shift.t(), upper=False)
            target = weight + torch.linalg.solve_triangular(factor.t(), half, upper=True).t()
            del factor
        # fewer tokens than that are too few to tell inputs by
        known = moments if len(x) >= _LEAST_TOKENS * x.shape[1] else None
        values, blocks = _in_bits(kind, target, known)
        self._add(names, blocks, found)
        # what the threads that rounded have freed
        trim_heap()
        return values

    def _check_finite(self, names: tuple[str, ...], *values: torch.Tensor) -> None:
        # a sum takes no memory, and is finite where all of it is
        if not all(bool(torch.isfinite(each.sum())) for each in values):
            raise CheckpointError(
                f"{self._checkpoint.path}: {names[0]}: a weight or an input is not finite"
            )

    def _add(
        self, names: tuple[str, ...], blocks: NDArray[np.uint8], found: dict[str, RoundedTensor]
    ) -> None:
        kind, first = self._kinds[f"{names[0]}.weight"], 0
        for name in names:
            rows = self._checkpoint.tensor_shape(f"{name}.weight")[0]
            found[f"{name}.weight"] = RoundedTensor(kind, blocks[first : first + rows])
            first += rows


def _in_bits(
    kind: GGUFType, weight: torch.Tensor, moments: torch.Tensor | None
) -> tuple[torch.Tensor, NDArray[np.uint8]]:
    """Return a matrix as it is read back, and its blocks; ``moments``: of its inputs, if known."""
    if kind == GGUFType.Q8_0:
        stored = gguf.GGMLQuantizationType(kind)
        eight = gguf.quants.quantize(weight.numpy(), stored)
        return torch.from_numpy(gguf.quants.dequantize(eight, stored)), eight
    if moments is None:
        rounded = round_nearest(weight, levels_of(kind))
    else:
        rounded = round_matrix(weight, moments, levels_of(kind), threads=torch.get_num_threads())
    return rounded.values(), as_blocks(rounded, kind)
