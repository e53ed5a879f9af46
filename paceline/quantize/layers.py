"""Rounding of a model layer by layer, each on the inputs that the rounded layers before it give.

Two streams of a calibration text run through the model: one through the weights as they are, one
through the rounded ones. A matrix is rounded when the second stream reaches it, so its errors are
weighed by the inputs that it will see when it serves. The outputs that it should give are those of
the first stream, so it also makes up for some of what earlier layers lost (as in GPTAQ: Li et al.
2025, arXiv 2504.02692). One layer is in memory at a time, in float32, as it was and as it is
rounded, with the inputs of its products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.backends.runner.interface import AttentionBatch
from paceline.backends.torch.attention import RotaryTable, TorchAttention
from paceline.backends.torch.linear import DenseLinear, Linear
from paceline.backends.torch.model import Decoder, DecoderWeights, LayerWeights, RMSNorm
from paceline.backends.torch.weights import TensorReader, TensorSource
from paceline.checkpoints.gguf.container import GGUFType
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import CheckpointError
from paceline.quantize.rounding import Rounded, as_blocks, levels_of, round_matrix, round_nearest

__all__ = ["LayerRounding", "RoundedTensor"]

_BLOCK: Final = 16
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
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class RoundedTensor:
    """A matrix in few bits."""

    kind: GGUFType
    # [rows, bytes of a row]
    blocks: NDArray[np.uint8]


# names of the matrices of one product, their rows [rows, columns] together, and their bias
_Make = Callable[[tuple[str, ...], torch.Tensor, torch.Tensor | None], Linear]


class _Reader(TensorReader):
    """A reader whose products are made by ``make``."""

    def __init__(self, source: TensorSource, stack: ExitStack, make: _Make) -> None:
        super().__init__(source, torch.float32, _CPU, stack)
        self._make = make

    def linear(self, *names: str) -> Linear:
        weight = torch.cat([self.get(f"{name}.weight") for name in names])
        biases = [bias for name in names if (bias := self.maybe(f"{name}.bias")) is not None]
        return self._make(names, weight, torch.cat(biases) if biases else None)


class _Noting(DenseLinear):
    """A product that keeps its inputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.inputs: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # without a norm before it a product reads the stream itself, which changes
        self.inputs = x.clone()
        return super().__call__(x)


class _RoundedLater:
    """A product whose weight is rounded when its inputs are there."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rounded: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._weight, self._bias, self._rounded = weight, bias, rounded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._rounded(self._weight, x), self._bias)


class _OneLayer(TorchAttention):
    """Attention of any one layer, within whole windows of the text."""

    def __init__(
        self, config: ModelConfig, index: int, sinks: torch.Tensor | None, shape: tuple[int, int]
    ) -> None:
        windows, length = shape
        blocks = -(-length // _BLOCK)
        alone = replace(
            config,
            num_hidden_layers=1,
            sliding_layers=(0,) if index in config.sliding_layers else (),
            unrotated_layers=(),
            dense_layers=(),
        )
        super().__init__(
            alone,
            num_blocks=windows * blocks,
            block_size=_BLOCK,
            dtype=torch.float32,
            device=_CPU,
            sinks=[sinks],
        )
        # what lies behind a window's end in its last block is masked, and must be a number for it
        self.clear_blocks(range(windows * blocks))
        self.prepare(
            AttentionBatch(
                np.zeros(windows, dtype=np.int64),
                np.full(windows, length, dtype=np.int64),
                np.arange(windows * blocks).reshape(windows, blocks),
            )
        )

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        return super().attend(0, qkv)


class LayerRounding:
    """The two streams between layers.

    Args:
        windows: token ids of the text, [windows, length].
        kinds: type by matrix of a layer; one that is missing keeps its values.
    """

    def __init__(
        self, checkpoint: Checkpoint, windows: torch.Tensor, kinds: Mapping[str, GGUFType]
    ) -> None:
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._kinds = kinds
        self._shape = (windows.shape[0], windows.shape[1])
        length, config = self._shape[1], self._config
        self._rotary = RotaryTable(config, length, dtype=torch.float32, device=_CPU)
        self._sliding: RotaryTable | None = None
        if config.sliding_rope is not None:
            self._sliding = RotaryTable(
                config, length, dtype=torch.float32, device=_CPU, rope=config.sliding_rope
            )
        with ExitStack() as stack:
            embedding = TensorReader(checkpoint, torch.float32, _CPU, stack).get(
                "model.embed_tokens.weight"
            )
        # [tokens, hidden] in float32
        self.exact = torch.nn.functional.embedding(windows.flatten(), embedding)
        self.exact *= config.embedding_scale
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
                return self._round(names, weight, x, exact.pop(names).inputs, found)

            return _RoundedLater(weight, bias, rounded)

        with ExitStack() as stack:
            self._run(index, _Reader(self._checkpoint, stack, noting).layer(index), self.exact)
            layer = _Reader(self._checkpoint, stack, later).layer(index)
            self._run(index, layer, self.rounded)
        # experts that no token of the text chose
        for names, weight in unseen.items():
            self._check_finite(names, weight)
            kind = self._kinds[f"{names[0]}.weight"]
            self._add(names, round_nearest(weight, levels_of(kind)), found)
        lost = (self.rounded - self.exact).square().sum() / self.exact.square().sum()
        if not bool(torch.isfinite(lost)):
            raise CheckpointError(f"{self._checkpoint.path}: layer {index} gives values that are "
                                  "not finite")  # fmt: skip
        return found, float(lost)

    def _run(self, index: int, layer: LayerWeights, x: torch.Tensor) -> None:
        config = self._config
        # all layers are this one, of which only ``index`` runs
        decoder = Decoder(
            config,
            DecoderWeights(
                embedding=x,
                layers=[layer] * config.num_hidden_layers,
                norm=RMSNorm(x[0], config.rms_norm_eps),
                head=None,
                head_weight=x,
            ),
            self._rotary,
            self._sliding,
        )
        positions = torch.arange(self._shape[1]).repeat(self._shape[0])
        attention = _OneLayer(config, index, layer.sinks, self._shape)
        decoder.add_layer(index, x, decoder.rotations(positions), attention)

    def _round(
        self,
        names: tuple[str, ...],
        weight: torch.Tensor,
        x: torch.Tensor,
        exact: torch.Tensor | None,
        found: dict[str, RoundedTensor],
    ) -> torch.Tensor:
        """Round the matrices of one product, add them to ``found``, and return their values."""
        kind = self._kinds[f"{names[0]}.weight"]
        moments, target = x.t() @ x, weight
        self._check_finite(names, weight, moments)
        # an expert sees other rows in the two streams
        if exact is not None and exact.shape == x.shape and ".experts." not in names[0]:
            damped = moments.clone()
            damped.diagonal().add_(damped.diagonal().mean() * _CORRECTION_DAMPING + _LEAST)
            shift = weight @ (exact.t() @ x - moments)
            factor = torch.linalg.cholesky(damped)
            target = weight + torch.cholesky_solve(shift.t(), factor).t()
        if len(x) < _LEAST_TOKENS * x.shape[1]:
            rounded = round_nearest(weight, levels_of(kind))
        else:
            rounded = round_matrix(
                target, moments, levels_of(kind), threads=torch.get_num_threads()
            )
        self._add(names, rounded, found)
        return rounded.values()

    def _check_finite(self, names: tuple[str, ...], *values: torch.Tensor) -> None:
        if not all(bool(torch.isfinite(each).all()) for each in values):
            raise CheckpointError(
                f"{self._checkpoint.path}: {names[0]}: a weight or an input is not finite"
            )

    def _add(
        self, names: tuple[str, ...], rounded: Rounded, found: dict[str, RoundedTensor]
    ) -> None:
        kind, first = self._kinds[f"{names[0]}.weight"], 0
        blocks = as_blocks(rounded, kind)
        for name in names:
            rows = self._checkpoint.tensor_shape(f"{name}.weight")[0]
            found[f"{name}.weight"] = RoundedTensor(kind, blocks[first : first + rows])
            first += rows
