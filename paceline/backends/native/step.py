"""The native compute path for the runner: a whole step in one call of the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.backends.machine.cpu import CPU_SHARE, available_memory, swap_seconds
from paceline.backends.machine.yielding import Beside, at_once
from paceline.backends.native.adapters import NativeAdapter
from paceline.backends.native.block_formats import Kinds, choose_kinds
from paceline.backends.native.config import NativeSettings
from paceline.backends.native.library import ABI, digest, limits
from paceline.backends.native.model import NativeModel, Rope
from paceline.backends.native.packed import PackedCopies
from paceline.backends.native.sampling import NativeSampler, token_logprobs
from paceline.backends.native.single_kernels import cache_bytes
from paceline.backends.native.tensors import OWN_BITS, Tensor, checkpoint_tensors
from paceline.backends.runner.interface import AttentionBatch, Ints, LoadedModel, PoolMemory
from paceline.backends.runner.rope import rotary_tables
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.config import ModelConfig
from paceline.core.outputs import BlockSwap, WindowBlock
from paceline.errors import ConfigError

__all__ = [
    "NativeLoader",
    "NativeStep",
    "native_block_bytes",
    "native_step_bytes",
    "native_window",
]

_HUGE_PAGE: Final = 2 << 20
_VALUE_BYTES: Final = {"float32": 4, "bfloat16": 2, "int8": 1}
# int8: float32 scales, one for a token's keys and one for its values in every head
_SCALE_BYTES: Final = {"float32": 0, "bfloat16": 0, "int8": 4}


def native_block_bytes(config: ModelConfig, block_size: int, kv_dtype: str) -> int:
    """Return the bytes of one KV block over all layers, as ``NativeModel.kv_bytes_per_block``."""
    per_head = 2 * (config.head_dim * _VALUE_BYTES[kv_dtype] + _SCALE_BYTES[kv_dtype])
    return config.num_hidden_layers * block_size * config.num_key_value_heads * per_head


def native_window(config: ModelConfig) -> int:
    """Return the window for ``steps.ModelLoader.window``."""
    if not config.sliding_layers or config.sliding_window is None:
        return 0
    return config.sliding_window + limits().keys_before_window


def native_step_bytes(config: ModelConfig, tokens: int, rows: int) -> int:
    """Return the bytes of a step's buffers for ``tokens`` tokens, ``rows`` of them with logits:
    kept after the first such step, in whole huge pages (``Model::reserve``, csrc/forward.cpp)."""
    heads, head_dim = config.num_attention_heads, config.head_dim
    attended, hidden = heads * head_dim, config.hidden_size
    # buffers of MLPs that all rows go through
    is_mixture = config.num_experts > 0 and not config.dense_layers
    inner = 0 if is_mixture else config.intermediate_size
    widest = max(hidden, inner, attended)
    widths = [
        hidden, widest, widest // 8 + 2, attended + 2 * config.num_key_value_heads * head_dim,
        attended, heads, attended, inner,
    ]  # fmt: skip
    if config.norms_after:
        widths.append(hidden)
    sizes = [4 * tokens * width for width in widths] + [4 * rows * config.vocab_size]
    if config.num_experts:
        # rows of one pass, and their pairs with experts (csrc/experts.cpp)
        passed = min(tokens, max(1, limits().pass_pairs // config.experts_per_token))
        pairs, inner = passed * config.experts_per_token, config.expert_intermediate_size
        widest = max(hidden, inner)
        sizes += [4 * passed * width for width in (hidden, config.num_experts)]
        sizes += [4 * pairs * width for width in (widest, widest // 8 + 2, inner, hidden)]
    return sum(-(-size // _HUGE_PAGE) * _HUGE_PAGE for size in sizes)


class NativeStep:
    """A ``interface.StepModel``. Its logits are numpy arrays in float32.

    The first ``num_blocks`` of the model's blocks are the pool; swapped blocks lie behind them,
    since the CPU has only host memory. Window blocks lie there too, so a model has either swapped
    or window blocks (``NativeLoader.load``).
    """

    def __init__(
        self,
        model: NativeModel,
        num_blocks: int,
        norm: tuple[NDArray[np.float32], float] | None = None,
        window_block_bytes: int = 0,
    ) -> None:
        self._window_block_bytes = window_block_bytes
        # window block by block, if there are any
        self._places = np.zeros(num_blocks if window_block_bytes else 0, dtype=np.int32)
        self._model = model
        self._num_blocks = num_blocks
        # weight and epsilon of the last norm; None unless hidden states are wanted
        self._norm = norm

    @property
    def isa(self) -> str:
        """Level of instructions of the kernels in use."""
        return self._model.isa

    @property
    def likeliest(self) -> NDArray[np.int32]:
        return self._model.likeliest

    def forward(
        self,
        token_ids: Ints,
        positions: Ints,
        batch: AttentionBatch,
        sampled: Ints,
        *,
        needs_logits: bool = True,
    ) -> NDArray[np.float32]:
        starts = np.zeros(len(batch.counts) + 1, dtype=np.int32)
        np.cumsum(batch.counts, out=starts[1:])
        tables = batch.block_tables
        return self._model.forward(
            token_ids, positions, starts, tables, sampled, needs_logits=needs_logits,
            window_tables=self._places[tables] if len(self._places) else None,
            adapters=batch.adapters,
        )  # fmt: skip

    def hidden(
        self, token_ids: Ints, positions: Ints, batch: AttentionBatch, wanted: Ints, kinds: Ints
    ) -> NDArray[np.float32]:
        """Implement ``pooling.runner.HiddenModel.hidden``; decoders ignore ``kinds``."""
        assert self._norm is not None, "loaded for its logits"
        starts = np.zeros(len(batch.counts) + 1, dtype=np.int32)
        np.cumsum(batch.counts, out=starts[1:])
        x = self._model.hidden(token_ids, positions, starts, batch.block_tables, wanted)
        weight, epsilon = self._norm
        squares = np.square(x).mean(axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(squares + epsilon) * weight, dtype=np.float32)

    def hand_over(self, wanted: int, offer: Callable[[], None], slice_s: float) -> int:
        """Implement ``interface.YieldingModel.hand_over``."""
        return self._model.hand_over(wanted, offer, slice_s)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._model.copy_blocks(pairs)

    def place(self, given: Sequence[WindowBlock]) -> None:
        """Implement ``steps.WindowedModel.place``; window blocks lie behind the other blocks."""
        size = self._window_block_bytes
        assert size or not given, "it was loaded without window blocks"
        for block, place, source in given:
            self._places[block] = place
            if source >= 0:
                windows = cache_bytes(self._model)[
                    self._num_blocks * self._model.kv_bytes_per_block :
                ]
                windows[place * size : (place + 1) * size] = windows[
                    source * size : (source + 1) * size
                ]

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        first = self._num_blocks
        self._model.copy_blocks(
            [(s.src, first + s.dst) if s.to_host else (first + s.src, s.dst) for s in swaps]
        )

    def block_layout(self) -> tuple[int, str] | None:
        """Implement ``interface.CopyableModel.block_layout``. Kernels of another level or build may
        give other bits."""
        if len(self._places):
            return None
        return self._model.kv_bytes_per_block, f"native {ABI} {digest()} {self.isa}"

    def read_blocks(self, block_ids: Sequence[int]) -> bytes:
        size = self._model.kv_bytes_per_block
        cache = cache_bytes(self._model)[: self._num_blocks * size].reshape(-1, size)
        return cache[np.asarray(block_ids, dtype=np.int64)].tobytes()

    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> None:
        size = self._model.kv_bytes_per_block
        cache = cache_bytes(self._model)[: self._num_blocks * size].reshape(-1, size)
        cache[np.asarray(block_ids, dtype=np.int64)] = np.frombuffer(data, np.uint8).reshape(
            -1, size
        )

    def mirror(self, other: NativeStep, block_ids: Ints) -> None:
        """Copy blocks of the KV cache of ``other``, which has the same layout, under the same
        ids."""
        assert not len(self._places) + len(other._places), (
            "a draft has no window blocks, and the model that it mirrors must have none"
        )
        own, theirs = cache_bytes(self._model), cache_bytes(other._model)
        size = self._model.kv_bytes_per_block
        for block in block_ids.tolist():
            place = slice(block * size, (block + 1) * size)
            own[place] = theirs[place]

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Do nothing: the kernels read no slot that was not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLoader:
    """A ``interface.ModelLoader`` for formats settled by ``choose_formats``."""

    checkpoint: Checkpoint
    dtype: str
    kv_dtype: str
    block_size: int
    max_model_len: int
    threads: int
    # level of the kernels; None: the best that runs here
    isa: str | None = None
    # False: hidden states are wanted, and no logits
    has_head: bool = True
    # packed weights on disk; None: no copies
    copies: PackedCopies | None = None
    # reads and packs the weights
    beside: Beside = at_once

    # memory is taken when it is written
    max_host_bytes = math.inf

    @property
    def block_bytes(self) -> int:
        return native_block_bytes(self.checkpoint.config, self.block_size, self.kv_dtype)

    @property
    def window(self) -> int:
        return native_window(self.checkpoint.config)

    @property
    def window_block_bytes(self) -> int:
        config = self.checkpoint.config
        return self.block_bytes * len(config.sliding_layers) // config.num_hidden_layers

    def pool_memory(self) -> PoolMemory:
        return PoolMemory(available_memory(), CPU_SHARE)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors, as they are packed."""
        in_bits = self.dtype in ("q4", OWN_BITS)
        return checkpoint_tensors(self.checkpoint, has_head=self.has_head, in_bits=in_bits)

    def load(
        self, num_blocks: int, num_host_blocks: int, num_window_blocks: int = 0
    ) -> LoadedModel:
        config, norm = self.checkpoint.config, None
        if num_window_blocks and (num_host_blocks or not self.has_head):
            beside = "hidden states" if num_host_blocks == 0 else f"{num_host_blocks} host blocks"
            raise ConfigError(f"{num_window_blocks} window blocks do not go with {beside}")
        if not self.has_head:
            weight = self.checkpoint.tensor("model.norm.weight") + np.float32(config.norm_offset)
            # epsilon for the sum as the library keeps it, see NativeModel
            norm = weight, config.rms_norm_eps / config.residual_scale**2
        tables, sliding = partial(rotary_tables, config, self.max_model_len), config.sliding_rope

        def prepare() -> tuple[Kinds, Rope, Rope | None]:
            kinds = choose_kinds(self.checkpoint, self.dtype)
            return kinds, tables(), None if sliding is None else tables(sliding)

        kinds, rope, sliding_rope = self.beside(prepare)
        model = NativeModel(
            config,
            self.tensors(),
            rope,
            NativeSettings(
                # for "gguf", the kinds below give each matrix its bits
                dtype="q4" if self.dtype == OWN_BITS else self.dtype,
                kv_dtype=self.kv_dtype,
                num_blocks=num_blocks + num_host_blocks,
                block_size=self.block_size,
                threads=self.threads,
                isa=self.isa,
                kinds=kinds.numbers,
                has_head=self.has_head,
                num_window_blocks=num_window_blocks,
            ),
            sliding_rope=sliding_rope,
            copies=self.copies,
            beside=self.beside,
        )

        def move(count: int) -> None:
            # between the first blocks: as slow a copy as any, and it touches only pages that the
            # first requests need anyway
            model.copy_blocks([(block, count + block) for block in range(count)])

        swapped = min(num_blocks, num_host_blocks)
        return LoadedModel(
            NativeStep(
                model, num_blocks, norm, self.window_block_bytes if num_window_blocks else 0
            ),
            NativeSampler(model),
            partial(token_logprobs, model=model),
            swap_seconds(move, swapped, self.block_bytes),
            partial(NativeAdapter, model.handle, config.num_hidden_layers),
        )
