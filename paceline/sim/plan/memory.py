"""Number of sequences that fit: memory reserved for the longest, against memory given in blocks.

Preallocation reserves ``max_len`` tokens for each sequence at its start, and wastes what it does
not reach; paging gives blocks as it grows, and wastes half a block on average (PagedAttention,
SOSP'23, arXiv 2309.06180). Whether a sequence fits at all is decided by the function that admission
uses (``core.memory.kv_cache.blocks_for``).

A count of paged sequences "at the mean length" is the textbook's: it takes every sequence at its
final, average size. In a running server most are still growing, so more fit on average, and since
lengths vary the pool must keep a reserve or preempt; docs/studies/paging.md measures both.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.config import SchedulerConfig
from paceline.core.memory.kv_cache import blocks_for
from paceline.core.memory.windows import window_blocks_needed
from paceline.errors import ConfigError

__all__ = ["PRESETS", "MemoryPlan", "Preset", "plan_memory"]

_GB = 1e9


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one replica, which may be several GPUs. Bytes and tokens."""

    memory_bytes: float
    weight_bytes: float
    # bytes left for keys and values
    kv_bytes: float
    kv_bytes_per_token: float
    block_size: int
    max_len: int
    mean_len: float
    num_blocks: int
    # sequences that run at once if each reserves max_len tokens
    preallocated: int
    # sequences that run at once if each holds the blocks of mean_len tokens
    paged: int
    # blocks for layers with a sliding window, whose keys and values are then in no other blocks
    num_window_blocks: int = 0
    window_bytes: float = 0.0

    @property
    def preallocated_waste(self) -> float:
        """Share of reserved memory that a mean sequence never writes."""
        return 1.0 - self.mean_len / self.max_len

    @property
    def paged_waste(self) -> float:
        """Unwritten share of a mean sequence's blocks: half a block on average."""
        return 1.0 - self.mean_len / (self.mean_len + _mean_slack(self.block_size))

    @property
    def gain(self) -> float:
        """Paged over preallocated sequences; infinite if none could be preallocated."""
        return self.paged / self.preallocated if self.preallocated else float("inf")


def _mean_slack(block_size: int) -> float:
    """Return the mean of unwritten positions in a last block, all remainders being as likely."""
    return (block_size - 1) / 2.0


def plan_memory(
    *,
    memory_bytes: float,
    weight_bytes: float,
    kv_bytes_per_token: float,
    max_len: int,
    mean_len: float,
    utilization: float = 0.9,
    reserve_bytes: float = 0.0,
    block_size: int = 16,
    window: int = 0,
    window_bytes_per_token: float = 0.0,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
) -> MemoryPlan:
    """Plan the memory by arithmetic.

    Args:
        utilization: share of memory that the server may use.
        reserve_bytes: part of that for activations and the runtime.
        max_len: prompt and output of the longest sequence.
        mean_len: prompt and output of a mean one.
        window: tokens that layers with a sliding window read, where such layers may have window
            blocks; 0: they may not.
        window_bytes_per_token: part of ``kv_bytes_per_token`` for such layers.
        max_num_seqs: most sequences that run at once, whose windows are counted.
        max_num_batched_tokens: tokens of a step, by which windows lag behind.

    Raises:
        ConfigError: nothing is left for keys and values, or not enough for one sequence of
            ``max_len``; the message has the numbers.
    """
    _require(0 < utilization <= 1, f"utilization must be in (0, 1], got {utilization:g}")
    _require(block_size >= 1, f"block size must be at least 1, got {block_size}")
    _require(
        1 <= mean_len <= max_len,
        f"mean length {mean_len:g} must be between 1 and the longest, {max_len}",
    )
    _require(kv_bytes_per_token > 0, f"KV bytes per token must be positive: {kv_bytes_per_token:g}")
    kv_bytes = memory_bytes * utilization - weight_bytes - reserve_bytes
    budget = (
        f"{memory_bytes / _GB:.1f} GB x {utilization:g} - {weight_bytes / _GB:.1f} GB of weights - "
        f"{reserve_bytes / _GB:.1f} GB reserved = {kv_bytes / _GB:.1f} GB"
    )
    _require(kv_bytes > 0, f"nothing is left for keys and values: {budget}")
    num_blocks, windows = int(kv_bytes / (kv_bytes_per_token * block_size)), 0
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        max_model_len=max_len,
    )
    needed = window_blocks_needed(limits, window, block_size)
    window_bytes, of_others = 0.0, kv_bytes_per_token - window_bytes_per_token
    if window and needed < num_blocks:
        windows, window_bytes = needed, needed * block_size * window_bytes_per_token
        if of_others:
            num_blocks = int((kv_bytes - window_bytes) / (of_others * block_size))
        else:
            num_blocks = max(num_blocks, max_num_seqs * blocks_for(max_len, block_size))
    _require(
        blocks_for(max_len, block_size) <= num_blocks,
        f"one sequence of {max_len} tokens needs {max_len * kv_bytes_per_token / _GB:.2f} GB, "
        f"but there is {budget}",
    )
    # a sequence of mean length holds half a block more than it writes
    held = mean_len + _mean_slack(block_size)
    paged = int(num_blocks * block_size / held)
    preallocated = num_blocks // blocks_for(max_len, block_size)
    if windows:
        # there are windows for no more than that
        paged, preallocated = min(paged, max_num_seqs), min(preallocated, max_num_seqs)
    return MemoryPlan(
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=block_size,
        max_len=max_len,
        mean_len=mean_len,
        num_blocks=num_blocks,
        preallocated=preallocated,
        paged=paged,
        num_window_blocks=windows,
        window_bytes=window_bytes,
    )


@dataclass(frozen=True, slots=True)
class Preset:
    """A textbook exercise, with every number it needs."""

    title: str
    memory_bytes: float
    weight_bytes: float
    kv_bytes_per_token: float
    max_len: int
    mean_len: float
    utilization: float


PRESETS: dict[str, Preset] = {
    # 20 billion parameters of two bytes, shaped like GPT-NeoX-20B: 44 layers, hidden 6144, separate
    # keys and values for every head
    "80gb-40gb": Preset(
        "an 80 GB GPU and a 40 GB model, 2048 tokens at most, 512 on average",
        80e9,
        40e9,
        2 * 44 * 6144 * 2,
        2048,
        512,
        1.0,
    ),
    # the PagedAttention paper's example: OPT-13B (40 layers, hidden 5120), 800 KB per token, on an
    # A100 of 40 GB with 30 % left for keys and values
    "opt-13b": Preset(
        "OPT-13B on a 40 GB A100, 2048 tokens at most, ShareGPT's 500 on average",
        40e9,
        26e9,
        2 * 40 * 5120 * 2,
        2048,
        500,
        0.95,
    ),
    # grouped-query attention: an eighth of the bytes per token, so long contexts fit
    "llama-3.1-8b": Preset(
        "Llama-3.1-8B on an 80 GB GPU, 8192 tokens at most, 1024 on average",
        80e9,
        16.06e9,
        2 * 32 * 8 * 128 * 2,
        8192,
        1024,
        0.9,
    ),
}
