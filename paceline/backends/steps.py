"""Between the runner and what computes: a step as numpy arrays in, logits and samples out.

Logits stay in whatever kind of array the model makes; only its own sampler looks inside. The runner
picks rows of them by an array of row numbers, which every kind of array allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.backends.sampling import SampleRow, Samples
from paceline.core.outputs import BlockSwap, TokenLogprobs, WindowBlock

__all__ = [
    "AttentionBatch",
    "Likeliest",
    "LoadedModel",
    "Logits",
    "ModelLoader",
    "Sampler",
    "Scorer",
    "StepModel",
    "WindowedModel",
]

# [rows, vocab] in float32
Logits: TypeAlias = Any
# what ``StepModel.likeliest`` said of them; a sampler need not take what its own model never says
Likeliest: TypeAlias = Any


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """The rows of one step. Tokens are flat, row after row; T is the sum of ``counts``."""

    # first position of each row computed in this step, [rows]
    starts: NDArray[np.int64]
    # positions of each row computed in this step, >= 1, [rows]
    counts: NDArray[np.int64]
    # block ids by position // block_size, [rows, width]; what follows a row's last one is ignored
    block_tables: NDArray[np.int64]


class StepModel(Protocol):
    """A loaded model and its paged KV cache. Called from one thread; block operations only between
    steps."""

    @property
    def likeliest(self) -> NDArray[np.int32] | None:
        """Of the last ``forward``: the first of the largest logits of each row, -1 where one is not
        finite; None where the model did not look."""
        ...

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        batch: AttentionBatch,
        sampled: NDArray[np.int64],
        *,
        needs_logits: bool = True,
    ) -> Logits:
        """Run one step: store keys and values of all tokens, attend causally.

        Args:
            token_ids: [T].
            positions: [T], below the model's longest sequence.
            sampled: [S], ascending: the tokens whose logits are wanted; may be empty.
            needs_logits: False: ``likeliest`` is enough where the model says it; it may then have
                estimated which logits can be the largest, and be wrong where the estimate fails.

        Returns:
            [S, vocab], valid until the next call; there may be no rows unless ``needs_logits``.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, in order."""
        ...

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        """Move whole blocks to and from host memory, in order."""
        ...

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Forget what blocks hold, before they are handed to a request."""
        ...


@runtime_checkable
class WindowedModel(Protocol):
    """A ``StepModel`` whose layers with a sliding window may have window blocks."""

    def place(self, given: Sequence[WindowBlock]) -> None:
        """Where these layers keep their part of blocks from now on, in order. Between steps; the
        first of a block comes before it is written."""
        ...


class Sampler(Protocol):
    """Chooses tokens from its model's logits, which are left as they are."""

    def sample(self, logits: Logits, rows: Sequence[SampleRow], likeliest: Likeliest) -> Samples:
        """A token for each row, by that row's own settings alone."""
        ...


class Scorer(Protocol):
    """Says how likely given tokens are by a model's logits, which are left as they are."""

    def __call__(
        self, logits: Logits, token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Log-probability and rank of one token per row, and the ``counts`` likeliest of the
        row."""
        ...


class LoadedModel(NamedTuple):
    """What a compute path makes of a checkpoint."""

    model: StepModel
    sampler: Sampler
    score: Scorer
    # measured seconds to move one block to or from host memory; 0.0 without any
    swap_block_seconds: float


class ModelLoader(Protocol):
    """One compute path, about to load one checkpoint in formats that are settled."""

    @property
    def block_bytes(self) -> int:
        """Of one KV block over all layers."""
        ...

    @property
    def window(self) -> int:
        """Tokens that a position may read of layers with a sliding window, itself included; 0:
        there are none, or they cannot have window blocks."""
        ...

    @property
    def window_block_bytes(self) -> int:
        """Of ``block_bytes``, those of layers with a sliding window."""
        ...

    @property
    def max_host_bytes(self) -> float:
        """Of memory to swap to, unless more is asked for; infinity where it is taken as it is
        used."""
        ...

    def pool_memory(self) -> tuple[int, float]:
        """Free bytes where the KV pool will be, and the share of them to take."""
        ...

    def load(
        self, num_blocks: int, num_host_blocks: int, num_window_blocks: int = 0
    ) -> LoadedModel:
        """Read the weights and make the KV pool; with window blocks the model is a
        ``WindowedModel``, and there is no host memory to swap to.

        Raises CheckpointError or ConfigError for a model that this path cannot compute.
        """
        ...
