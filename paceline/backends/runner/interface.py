"""The interface between the runner and what computes: steps as numpy arrays, logits and samples.

Logits stay in the model's own kind of array; only its own sampler looks inside. The runner picks
rows of them by an array of row numbers, which every kind of array allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.backends.runner.sampling import SampleRow, Samples
from paceline.checkpoints.model.adapter import AdapterValues
from paceline.core.outputs import BlockSwap, TokenLogprobs, WindowBlock

__all__ = [
    "ADAPTER_BYTES",
    "AdapterMaker",
    "AttentionBatch",
    "CopyableModel",
    "Likeliest",
    "LoadedAdapter",
    "LoadedModel",
    "Logits",
    "ModelLoader",
    "PoolMemory",
    "RowAdapter",
    "Sampler",
    "Scorer",
    "StepModel",
    "WindowedModel",
    "YieldingModel",
]

# [rows, vocab] in float32
Logits: TypeAlias = Any
# value of ``StepModel.likeliest``; a sampler need not support what its own model never returns
Likeliest: TypeAlias = Any
# ids, positions, counts and indices
Ints: TypeAlias = NDArray[np.int64]


class RowAdapter(NamedTuple):
    """A row's adapter, as its model's ``LoadedModel.make_adapter`` made it."""

    adapter: Any
    # factor on what it adds
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """The rows of one step. Tokens are flat, row after row; T is the sum of ``counts``."""

    # first position of each row computed in this step, [rows]
    starts: Ints
    # positions of each row computed in this step, >= 1, [rows]
    counts: Ints
    # block ids by position // block_size, [rows, width]; entries behind a row's last are ignored
    block_tables: Ints
    # by row, None where it has no adapter; None: no row has one
    adapters: Sequence[RowAdapter | None] | None = None


class StepModel(Protocol):
    """A loaded model and its paged KV cache. Called from one thread; block operations come between
    steps."""

    @property
    def likeliest(self) -> NDArray[np.int32] | None:
        """Index of the first largest logit of each row of the last ``forward``, -1 where a logit is
        not finite; None where the model did not look."""

    def forward(
        self,
        token_ids: Ints,
        positions: Ints,
        batch: AttentionBatch,
        sampled: Ints,
        *,
        needs_logits: bool = True,
    ) -> Logits:
        """Run one step: store keys and values of all tokens, attend causally.

        Args:
            token_ids: [T].
            positions: [T], below the model's longest sequence.
            sampled: [S], ascending: the tokens whose logits are wanted; may be empty.
            needs_logits: False: ``likeliest`` suffices where the model provides it; the model may
                then estimate which logits can be the largest, and be wrong where that fails.

        Returns:
            [S, vocab], valid until the next call; maybe without rows unless ``needs_logits``.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, in order."""

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        """Move whole blocks to and from host memory, in order."""

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear what blocks hold, before they are handed to a request."""


@runtime_checkable
class CopyableModel(Protocol):
    """A ``StepModel`` whose blocks can be copied out and in, see ``core.backend.BlockMemory``."""

    def block_layout(self) -> tuple[int, str] | None: ...
    def read_blocks(self, block_ids: Sequence[int]) -> bytes: ...
    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> None: ...


@runtime_checkable
class WindowedModel(Protocol):
    """A ``StepModel`` whose layers with a sliding window may have window blocks."""

    def place(self, given: Sequence[WindowBlock]) -> None:
        """Assign window blocks to blocks from now on, in order. Between steps; a block's first
        assignment comes before the block is written."""


@runtime_checkable
class YieldingModel(Protocol):
    """A ``StepModel`` that can stop within a step while others compute on its processors."""

    def hand_over(self, wanted: int, offer: Callable[[], None], slice_s: float) -> int:
        """Call ``offer`` between layers from now on, from the model's thread, while the 64 bits at
        the address ``wanted`` are not zero, ``slice_s`` seconds apart at least. Return how many
        times a step can call it."""


class Sampler(Protocol):
    """Chooser of tokens by its model's logits, which it does not change."""

    def sample(self, logits: Logits, rows: Sequence[SampleRow], likeliest: Likeliest) -> Samples:
        """Return a token for each row, chosen by that row's own settings alone."""


class Scorer(Protocol):
    """Rater of given tokens by a model's logits, which it does not change."""

    def __call__(
        self, logits: Logits, token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return log-probability and rank of one token per row, and its ``counts`` likeliest
        tokens."""


class LoadedAdapter(Protocol):
    """An adapter ready to compute with; its memory goes with the last reference."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""


# formats of adapters' values, and bytes of one
ADAPTER_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float32": 4, "int8": 1}


class AdapterMaker(Protocol):
    """Maker of adapters for one loaded model."""

    def __call__(
        self, values: AdapterValues, *, dtype: str, pause: Callable[[], None]
    ) -> LoadedAdapter:
        """Make an adapter, on any thread, while the model runs. Raises ConfigError for a format
        that this path does not have.

        Args:
            dtype: how values are kept, of ``ADAPTER_BYTES``.
            pause: called after each matrix.
        """


class LoadedModel(NamedTuple):
    """A checkpoint that a compute path has loaded."""

    model: StepModel
    sampler: Sampler
    score: Scorer
    # measured seconds to move one block to or from host memory; 0.0 without any
    swap_block_seconds: float
    # makes an adapter to name in ``AttentionBatch.adapters``; None: this model has none
    make_adapter: AdapterMaker | None = None


class PoolMemory(NamedTuple):
    """Memory where the KV pool will be."""

    free_bytes: int
    # share of them to take
    share: float


class ModelLoader(Protocol):
    """One compute path, about to load one checkpoint in settled formats."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""

    @property
    def window(self) -> int:
        """Window in tokens of layers with a sliding window, the position itself included; 0: there
        are none, or they cannot have window blocks."""

    @property
    def window_block_bytes(self) -> int:
        """Part of ``block_bytes`` that belongs to layers with a sliding window."""

    @property
    def max_host_bytes(self) -> float:
        """Default bytes of host memory for swapping; infinity where it is allocated as it is
        used."""

    def pool_memory(self) -> PoolMemory:
        """Return the memory there is for the KV pool now."""

    def load(
        self, num_blocks: int, num_host_blocks: int, num_window_blocks: int = 0
    ) -> LoadedModel:
        """Read the weights and make the KV pool; with window blocks the model is a
        ``WindowedModel``, and there is no host memory to swap to.

        Raises CheckpointError or ConfigError for a model that this path cannot compute.
        """
