"""Paged attention: the seam for faster kernels, and a reference in plain PyTorch.

The keys and values of every layer live in one tensor, a row per block::

    cache[layer, block, 0 = keys | 1 = values, kv_head, offset in block, head_dim]

so one kv head's part of a block is contiguous. Gathering a request's blocks in the order
(keys | values, request, kv head, block) then lays each head's keys out as one matrix
[context, head_dim], ready for a batched product without another copy.

Query heads that share a kv head are rows of the same product: the queries of a request are one
matrix [group * queries, head_dim] per kv head, so keys and values are never repeated.

Requests are padded to a common shape in groups of similar shape. A padded position reads the null
block, which stays zero, or the unwritten tail of a request's last block, which was cleared when the
block was handed out: a masked weight of 0 times a stale NaN would be NaN.

Window blocks of layers with a sliding window lie in a second tensor of the same layout, and
positions outside a row's window are read from the null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from paceline.backends.runner.interface import AttentionBatch, Ints
from paceline.backends.runner.rope import rotary_tables
from paceline.checkpoints.model.config import ModelConfig, RopeConfig
from paceline.core.outputs import BlockSwap, WindowBlock

__all__ = ["AttentionBackend", "RotaryTable", "TorchAttention", "block_bytes"]

# longest run of one request's queries in one product: it bounds the scores' memory, and keeps an
# earlier run from reading a later run's keys
_MAX_QUERIES: Final = 256
# most scores [requests, heads, queries, keys] of one product, unless a single request has more
_MAX_SCORES: Final = 1 << 25
# cost of a product is (queries + _GATHER_COST) * keys: reading a key costs as much as some scores
_GATHER_COST: Final = 8
# padding tolerated in a group, in that unit: about the cost of launching one more group
_GROUP_OVERHEAD: Final = 6000


class AttentionBackend(Protocol):
    """Owner of the paged cache. Called from one thread: ``prepare`` once per step, then ``attend``
    once per layer in order; block operations only between steps."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Derive what all layers of the step need. Reads ``batch`` before returning, and keeps no
        reference to it."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Store the step's keys and values, then attend causally.

        Args:
            qkv: [T, heads + 2 * kv_heads, head_dim]: rotated queries, rotated keys, values.

        Returns:
            [T, heads * head_dim], a fresh tensor.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, in order."""

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        """Move whole blocks to and from host memory, in order."""

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear what blocks hold, before they are handed to a request."""


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block: keys and values of ``block_size`` positions in all layers."""
    per_position = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return config.num_hidden_layers * block_size * per_position


class _Segment(NamedTuple):
    """A run of one row's queries."""

    queries: int
    # keys that the last query sees
    keys: int
    row: int
    # index of the first query among the step's tokens
    token: int


@dataclass(slots=True)
class _Group:
    """Segments computed by one batched product, padded to [size, queries, keys]."""

    size: int
    queries: int
    keys: int
    # cache rows (of block_size * head_dim numbers) in the order keys | values, request, head, block
    gather: torch.Tensor
    # the same for layers with window blocks
    window_gather: torch.Tensor
    # token of each query, [size * queries]; None: all tokens of the step in order
    tokens: torch.Tensor | None
    # indices of those that are not padding; None: all
    real: torch.Tensor | None
    # added to the scores, [size, 1, queries, keys]; None: every key is visible
    mask: torch.Tensor | None
    # the same within the sliding window
    window_mask: torch.Tensor | None


def _split(segments: list[_Segment], heads: int) -> list[list[_Segment]]:
    """Group segments of similar shape so that padding stays cheap. If one group suffices it keeps
    the given order, and a step of single tokens then needs no reordering."""
    queries = max(segment.queries for segment in segments)
    keys = max(segment.keys for segment in segments)
    useful = sum(_cost(segment.queries, segment.keys) for segment in segments)
    if _fits(len(segments), queries, keys, useful, heads):
        return [segments]
    groups: list[list[_Segment]] = []
    group: list[_Segment] = []
    queries = keys = useful = 0
    for segment in sorted(segments, key=lambda s: (-s.queries, -s.keys)):
        # sorted: the first of a group has the most queries, but not always the most keys
        wider = max(queries, segment.queries), max(keys, segment.keys)
        more = useful + _cost(segment.queries, segment.keys)
        if group and not _fits(len(group) + 1, *wider, more, heads):
            groups.append(group)
            group = []
            wider = segment.queries, segment.keys
            more = _cost(*wider)
        group.append(segment)
        (queries, keys), useful = wider, more
    return [*groups, group]


def _cost(queries: int, keys: int) -> int:
    return (queries + _GATHER_COST) * keys


def _fits(size: int, queries: int, keys: int, useful: int, heads: int) -> bool:
    """Tell whether ``size`` padded segments may be one product. ``useful`` is their
    cost without padding."""
    waste = size * _cost(queries, keys) - useful
    return (
        waste <= max(_GROUP_OVERHEAD, useful // 4) and size * heads * queries * keys <= _MAX_SCORES
    )


class TorchAttention:
    """The reference: gather, batched product, softmax, batched product.

    Args:
        num_blocks: blocks in the pool; ids are [0, num_blocks).
        num_host_blocks: blocks of host memory for swapping, allocated when first needed.
        num_window_blocks: for layers with a sliding window; 0: they use the ordinary blocks.
        sinks: per layer, [heads]: scores that count in the softmax's sum and have no value; None
            for a layer, or for all: there are none.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        num_window_blocks: int = 0,
        sinks: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim, self._block_size = config.head_dim, block_size
        self._scale, self._softcap = config.scale, config.attention_softcap
        self._sinks = [None] * config.num_hidden_layers if sinks is None else list(sinks)
        self._null_block = num_blocks
        self._device, self._dtype = device, dtype
        sliding = frozenset(config.sliding_layers) if config.sliding_window else frozenset()
        self._slides = [layer in sliding for layer in range(config.num_hidden_layers)]
        self._window = config.sliding_window if any(self._slides) else None
        # layers that have window blocks
        self._windowed = self._slides if num_window_blocks else [False] * len(self._slides)

        def make_cache(layers: int, blocks: int) -> torch.Tensor:
            # not zeroed: blocks are cleared when handed out, so memory is touched when it is used
            shape = layers, blocks + 1, 2, self._kv_heads, block_size, config.head_dim
            cache = torch.empty(*shape, dtype=dtype, device=device)
            cache[:, blocks] = 0
            return cache

        self._null_window_block, num_windowed = num_window_blocks, sum(self._windowed)
        self._cache = make_cache(len(self._windowed) - num_windowed, num_blocks)
        self._window_cache = make_cache(num_windowed, num_window_blocks)
        # window block by block
        self._places = np.full(num_blocks if num_window_blocks else 0, -1, dtype=np.int64)
        self._num_host_blocks = num_host_blocks
        # made when the first block is swapped out
        self._host: torch.Tensor | None = None
        others, windowed = iter(self._cache), iter(self._window_cache)
        layers = [next(windowed if own else others) for own in self._windowed]
        self._by_block = [layer.view(-1, block_size * config.head_dim) for layer in layers]
        self._by_slot = [layer.view(-1, config.head_dim) for layer in layers]
        # gathered keys and values, used by one group of one layer at a time
        self._workspace = torch.empty(0, dtype=dtype, device=device)
        self._slots = self._window_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._groups: list[_Group] = []

    @property
    def cache(self) -> torch.Tensor:
        """[layers, blocks + 1, 2, kv_heads, block_size, head_dim], for tests and transfer, without
        window blocks."""
        return self._cache

    @property
    def has_window_blocks(self) -> bool:
        return len(self._places) > 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, as ``read_blocks`` gives them."""
        return int(self._cache[:, 0].numel() * self._cache.element_size())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._cache[:, destination] = self._cache[:, source]

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None:
        if self._host is None:
            layers, _, *block = self._cache.shape
            self._host = torch.empty(
                layers,
                self._num_host_blocks,
                *block,
                dtype=self._dtype,
                pin_memory=self._device.type == "cuda",
            )
        for src, dst, to_host in swaps:
            # a copy from pinned memory is queued like any other operation on the device; a copy to
            # it is awaited, or the block could be read back before it has arrived
            if to_host:
                self._host[:, dst] = self._cache[:, src]
            else:
                self._cache[:, dst].copy_(self._host[:, src], non_blocking=True)

    def read_blocks(self, block_ids: Sequence[int]) -> bytes:
        ids = self._to_device(np.asarray(block_ids, dtype=np.int64))
        blocks = self._cache[:, ids].transpose(0, 1).contiguous()
        return blocks.view(torch.uint8).cpu().numpy().tobytes()

    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> None:
        layers, _, *block = self._cache.shape
        blocks = torch.frombuffer(bytearray(data), dtype=self._dtype).view(-1, layers, *block)
        ids = self._to_device(np.asarray(block_ids, dtype=np.int64))
        self._cache[:, ids] = blocks.to(self._device).transpose(0, 1)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._cache[:, self._to_device(np.asarray(block_ids, dtype=np.int64))] = 0

    def place(self, given: Sequence[WindowBlock]) -> None:
        for block, place, source in given:
            self._window_cache[:, place] = 0 if source < 0 else self._window_cache[:, source]
            self._places[block] = place

    def prepare(self, batch: AttentionBatch) -> None:
        firsts = np.cumsum(batch.counts) - batch.counts
        blocks = self._written_blocks(batch, firsts)
        self._slots = self._window_slots = self._to_device(self._slot_mapping(*blocks))
        if len(self._places):
            window_blocks = self._places[blocks[0]]
            assert (window_blocks >= 0).all(), "a block is written that has no window block"
            self._window_slots = self._to_device(self._slot_mapping(window_blocks, blocks[1]))
        segments = self._segments(batch, firsts)
        total = int(batch.counts.sum())
        self._groups = [
            self._make_group(batch, group, total) for group in _split(segments, self._heads)
        ]
        needed = max(group.gather.numel() for group in self._groups)
        needed *= self._block_size * self._head_dim
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed, dtype=self._dtype, device=self._device)

    def _written_blocks(self, batch: AttentionBatch, firsts: Ints) -> tuple[Ints, Ints]:
        """Return the block to which each token is written, and its offset there: [T] both."""
        row = np.repeat(np.arange(len(batch.counts)), batch.counts)
        position = np.arange(len(row)) + (batch.starts - firsts)[row]
        index, offset = np.divmod(position, self._block_size)
        return batch.block_tables[row, index], offset

    def _slot_mapping(self, block: Ints, offset: Ints) -> Ints:
        """Return rows of ``_by_slot`` for each token's keys, then values: [T, 2 * kv_heads]."""
        part = np.arange(2 * self._kv_heads)
        slots: Ints = (block[:, None] * len(part) + part) * self._block_size + offset[:, None]
        return slots

    def _segments(self, batch: AttentionBatch, firsts: Ints) -> list[_Segment]:
        segments = []
        rows = zip(batch.starts.tolist(), batch.counts.tolist(), firsts.tolist(), strict=True)
        for row, (start, count, first) in enumerate(rows):
            most = _MAX_SCORES // (self._heads * (start + count))
            run = min(_MAX_QUERIES, max(16, most))
            for done in range(0, count, run):
                size = min(run, count - done)
                segments.append(_Segment(size, start + done + size, row, first + done))
        return segments

    def _make_group(self, batch: AttentionBatch, segments: list[_Segment], total: int) -> _Group:
        shape = np.array(segments, dtype=np.int64)
        count, seen, row, token = shape.T
        size, queries = len(segments), int(count.max())
        # whole blocks, masked: a shorter view would be copied by the product
        num_blocks = -(-int(seen.max()) // self._block_size)
        keys = num_blocks * self._block_size
        index = np.arange(num_blocks)
        held = index < -(-seen // self._block_size)[:, None]
        width = batch.block_tables.shape[1]
        tables = batch.block_tables[row[:, None], np.minimum(index, width - 1)]
        gather = self._gather(np.where(held, tables, self._null_block))
        window_gather = gather
        if len(self._places) and self._window is not None:
            oldest = np.maximum(0, seen - count - self._window + 1) // self._block_size
            held &= index >= oldest[:, None]
            window_gather = self._gather(
                np.where(held, self._places[tables], self._null_window_block)
            )
        # a padded query repeats the segment's last one; its result is dropped
        query = np.arange(queries)
        step = np.minimum(query, count[:, None] - 1)
        real = query < count[:, None]
        tokens = (token[:, None] + step).reshape(-1)
        everything = len(tokens) == total and bool((tokens == np.arange(total)).all())
        last_seen = (seen - count)[:, None] + step
        full, windowed = self._masks(last_seen, keys)
        return _Group(
            size=size,
            queries=queries,
            keys=keys,
            gather=gather,
            window_gather=window_gather,
            tokens=None if everything else self._to_device(tokens),
            real=None if real.all() else self._to_device(np.flatnonzero(real)),
            mask=full,
            window_mask=windowed,
        )

    def _gather(self, tables: Ints) -> torch.Tensor:
        """Return ``_Group.gather`` for block tables [size, num_blocks]."""
        # [2, size, kv_heads, num_blocks]
        part = np.arange(2 * self._kv_heads).reshape(2, 1, self._kv_heads, 1)
        rows = tables[None, :, None, :] * (2 * self._kv_heads) + part
        return self._to_device(rows.reshape(-1))

    def _masks(self, last_seen: Ints, keys: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return masks [size, 1, queries, keys] for queries at positions ``last_seen``: one for all
        earlier positions, and one for the sliding window."""
        position = self._to_device(last_seen)[:, None, :, None]
        key = torch.arange(keys, device=self._device)
        hidden = key > position
        full = None
        if (last_seen < keys - 1).any():
            full = self._as_bias(hidden)
        windowed = full
        if self._window is not None and (last_seen >= self._window).any():
            windowed = self._as_bias(hidden | (key <= position - self._window))
        return full, windowed

    def _as_bias(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return bias.masked_fill_(hidden, float("-inf"))

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        slots = self._window_slots if self._windowed[layer] else self._slots
        self._by_slot[layer].index_put_((slots,), qkv[:, self._heads :])
        if len(self._groups) == 1 and self._groups[0].tokens is None:
            return self._attend_group(layer, self._groups[0], qkv[:, : self._heads])
        out = qkv.new_empty(qkv.shape[0], self._heads * self._head_dim)
        for group in self._groups:
            if group.tokens is None:
                out[:] = self._attend_group(layer, group, qkv[:, : self._heads])
                continue
            result = self._attend_group(layer, group, qkv[group.tokens, : self._heads])
            if group.real is None:
                out[group.tokens] = result
            else:
                out[group.tokens[group.real]] = result[group.real]
        return out

    def _attend_group(self, layer: int, group: _Group, query: torch.Tensor) -> torch.Tensor:
        """Map query [size * queries, heads, head_dim] to [size * queries, heads * head_dim]."""
        size, queries, keys = group.size, group.queries, group.keys
        kv_heads, head_dim = self._kv_heads, self._head_dim
        shared = self._heads // kv_heads
        buffer = self._workspace[: group.gather.numel() * self._block_size * head_dim]
        buffer = buffer.view(-1, self._block_size * head_dim)
        gather = group.window_gather if self._windowed[layer] else group.gather
        torch.index_select(self._by_block[layer], 0, gather, out=buffer)
        key, value = buffer.view(2, size * kv_heads, keys, head_dim)
        scaled = query * self._scale
        if queries > 1:
            scaled = scaled.view(size, queries, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
        scaled = scaled.reshape(size * kv_heads, shared * queries, head_dim)
        scores = torch.bmm(scaled, key.transpose(1, 2))
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        mask = group.window_mask if self._slides[layer] else group.mask
        if mask is not None:
            scores.view(size, kv_heads * shared, queries, keys).add_(mask)
        sinks = self._sinks[layer]
        if sinks is None:
            shares = torch.softmax(scores, dim=-1)
        else:
            column = sinks.to(scores.dtype).view(1, -1, 1).expand(size, -1, queries)
            column = column.reshape(size * kv_heads, shared * queries, 1)
            shares = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
        out = torch.bmm(shares, value)
        if queries > 1:
            out = out.view(size, kv_heads, shared, queries, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(size * queries, self._heads * head_dim)

    def _to_device(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class RotaryTable:
    """Rotary position embedding: dimension ``i`` of a head's first half is rotated against
    dimension ``i`` of its second half, by the angles of ``backends.runner.rope``.

    Cosines and sines of positions ``[0, length)``, in the model's dtype.

    A row of ``cos`` is [c, c] and of ``sin`` [-s, s], so that with the halves of x swapped the
    rotation is ``x * cos + swap(x) * sin``. Computed in float32, then cast. ``rope`` is the
    embedding of some layers; None: ``config.rope``.
    """

    def __init__(
        self,
        config: ModelConfig,
        length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rope: RopeConfig | None = None,
    ) -> None:
        cos, sin = (torch.from_numpy(table) for table in rotary_tables(config, length, rope))
        self._cos = torch.cat((cos, cos), dim=-1)[:, None].to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None].to(device=device, dtype=dtype)
        self._half = config.head_dim // 2

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for positions [T]: two tensors [T, 1, head_dim], once a step."""
        return self._cos[positions], self._sin[positions]

    def rotate_(self, heads: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Rotate heads [T, N, head_dim] in place."""
        cos, sin = rows
        swapped = heads.roll(self._half, -1)
        torch.addcmul(heads * cos, swapped, sin, out=heads)
