"""Layers run one at a time over pieces of a text, with the decoder that serves.

This module does not know what the products of a layer are made of: their makers say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from paceline.backends.runner.interface import AttentionBatch
from paceline.backends.torch.attention import RotaryTable, TorchAttention
from paceline.backends.torch.linear import MLP, Adapt, DenseLinear, DenseMLP, Linear
from paceline.backends.torch.model import Decoder, DecoderWeights, LayerWeights, RMSNorm
from paceline.backends.torch.weights import TensorReader, TensorSource
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.config import ModelConfig

__all__ = ["Maker", "Seeing", "Streams", "dense"]

_BLOCK: Final = 16
# rows of an MLP's inner products that are made at once
_ROWS: Final = 1024
# most tokens, but for one window, that attend at once
_TOKENS: Final = 2048
_CPU: Final = torch.device("cpu")

# names of the matrices of one product, their rows [rows, columns] together, and their bias
Maker: TypeAlias = Callable[[tuple[str, ...], torch.Tensor, torch.Tensor | None], Linear]


def dense(names: tuple[str, ...], weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Make a product of the weights as they are."""
    return DenseLinear(weight, bias)


@runtime_checkable
class Seeing(Protocol):
    """A product that needs all of its input before any of its output is made."""

    def see(self, x: torch.Tensor) -> Linear:
        """Return what multiplies any rows of ``x``."""


class _RowsMLP(DenseMLP):
    """A gated MLP that makes the product with gate and up, the widest, some rows at a time."""

    def __call__(self, x: torch.Tensor, adapt: Adapt | None = None) -> torch.Tensor:
        seeing = self._gate_up
        product = seeing.see(x) if isinstance(seeing, Seeing) else seeing
        inner: torch.Tensor | None = None
        for start in range(0, len(x), _ROWS):
            rows = slice(start, start + _ROWS)
            part = self._gated(*product(x[rows]).chunk(2, dim=-1))
            if inner is None:
                inner = part.new_empty(len(x), part.shape[1])
            inner[rows] = part
        assert inner is not None, "no rows"
        del product
        return self._down(inner)


class _Reader(TensorReader):
    """A reader whose products are made by ``make``."""

    def __init__(self, source: TensorSource, stack: ExitStack, make: Maker) -> None:
        super().__init__(source, torch.float32, _CPU, stack)
        self._make = make

    def linear(self, *names: str) -> Linear:
        weight = torch.cat([self.get(f"{name}.weight") for name in names])
        biases = [bias for name in names if (bias := self.maybe(f"{name}.bias")) is not None]
        return self._make(names, weight, torch.cat(biases) if biases else None)

    def mlp(self, name: str) -> MLP:
        if f"{name}.router.weight" in self._shapes:
            return super().mlp(name)
        config = self._source.config
        gate_up = self.linear(f"{name}.gate_proj", f"{name}.up_proj")
        down = self.linear(f"{name}.down_proj")
        return _RowsMLP(gate_up, down, config.activation, config.swiglu_limit)


class _OneLayer(TorchAttention):
    """Attention of any one layer within windows of the text, a few of them at a time: their keys
    and values take the same blocks."""

    def __init__(
        self, config: ModelConfig, index: int, sinks: torch.Tensor | None, length: int
    ) -> None:
        self._length, self._blocks = length, -(-length // _BLOCK)
        self._windows = max(1, _TOKENS // length)
        alone = replace(
            config,
            num_hidden_layers=1,
            sliding_layers=(0,) if index in config.sliding_layers else (),
            unrotated_layers=(),
            dense_layers=(),
        )
        super().__init__(
            alone,
            num_blocks=self._windows * self._blocks,
            block_size=_BLOCK,
            dtype=torch.float32,
            device=_CPU,
            sinks=[sinks],
        )
        # what lies behind a window's end in its last block is masked, and must be a number for it
        self.clear_blocks(range(self._windows * self._blocks))

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        parts = []
        for rows in torch.split(qkv, self._windows * self._length):
            windows = len(rows) // self._length
            self.prepare(
                AttentionBatch(
                    np.zeros(windows, dtype=np.int64),
                    np.full(windows, self._length, dtype=np.int64),
                    np.arange(windows * self._blocks).reshape(windows, self._blocks),
                )
            )
            parts.append(super().attend(0, rows))
        return torch.cat(parts)


class Streams:
    """Runs a model's layers over pieces of a text, all of one length."""

    def __init__(self, checkpoint: Checkpoint, length: int) -> None:
        self._checkpoint, self._config, self._length = checkpoint, checkpoint.config, length
        config = self._config
        self._rotary = RotaryTable(config, length, dtype=torch.float32, device=_CPU)
        self._sliding: RotaryTable | None = None
        if config.sliding_rope is not None:
            self._sliding = RotaryTable(
                config, length, dtype=torch.float32, device=_CPU, rope=config.sliding_rope
            )

    def embed(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input, [pieces * length, hidden] in float32."""
        with ExitStack() as stack:
            embedding = TensorReader(self._checkpoint, torch.float32, _CPU, stack).get(
                "model.embed_tokens.weight"
            )
        return torch.nn.functional.embedding(windows.flatten(), embedding).mul_(
            self._config.embedding_scale
        )

    @contextmanager
    def layer(self, index: int, make: Maker) -> Iterator[LayerWeights]:
        """Read a layer, whose products ``make`` makes."""
        with ExitStack() as stack:
            yield _Reader(self._checkpoint, stack, make).layer(index)

    def run(self, index: int, layer: LayerWeights, x: torch.Tensor) -> None:
        """Add a layer's output to ``x``, [pieces * length, hidden], in place."""
        decoder = self._decoder(layer, x, None)
        positions = torch.arange(self._length).repeat(len(x) // self._length)
        attention = _OneLayer(self._config, index, layer.sinks, self._length)
        decoder.add_layer(index, x, decoder.rotations(positions), attention)

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield what maps the last layer's output to logits, [tokens, vocab]."""
        name = (
            "lm_head.weight"
            if not self._config.tie_word_embeddings
            else ("model.embed_tokens.weight")
        )
        with ExitStack() as stack:
            reader = TensorReader(self._checkpoint, torch.float32, _CPU, stack)
            norm, weight = reader.norm("model.norm.weight"), reader.get(name)
        decoder = self._decoder(None, weight, DenseLinear(weight, None))
        yield lambda x: decoder.logits(norm(x))

    def _decoder(self, layer: LayerWeights | None, x: torch.Tensor, head: Linear | None) -> Decoder:
        # all layers are this one, of which only one runs
        layers = [] if layer is None else [layer] * self._config.num_hidden_layers
        norm = RMSNorm(x[0], self._config.rms_norm_eps)
        weights = DecoderWeights(embedding=x, layers=layers, norm=norm, head=head, head_weight=x)
        return Decoder(self._config, weights, self._rotary, self._sliding)
