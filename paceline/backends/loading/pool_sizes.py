"""Division of memory between blocks of the KV pool, window blocks and host blocks."""

from __future__ import annotations

from typing import NamedTuple

from paceline.backends.drafting.draft_model import DraftPlan
from paceline.backends.loading.plan import LoadPlan
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.machine.cpu import choose_num_blocks
from paceline.backends.runner.interface import ModelLoader, PoolMemory
from paceline.checkpoints.gguf.shards import weight_files
from paceline.core.config import SchedulerConfig
from paceline.core.memory.windows import window_blocks_needed
from paceline.errors import ConfigError

__all__ = [
    "PoolSizes",
    "bounded_memory",
    "choose_blocks",
    "choose_sizes",
    "choose_windows",
    "host_blocks",
]

_NONE = "layers with a sliding window keep the keys and values of whole requests"


class PoolSizes(NamedTuple):
    """Blocks of the KV pool."""

    # ordinary blocks, that fit into memory with the window blocks
    num_blocks: int
    # blocks for layers with a sliding window; 0: these use ordinary blocks
    num_window_blocks: int = 0
    # blocks of host memory to swap to
    num_host_blocks: int = 0
    # reason for no window blocks, for users; empty where there are some or no layer needs them
    why: str = ""


def choose_sizes(plan: LoadPlan, loader: ModelLoader, draft: DraftPlan | None) -> PoolSizes:
    """Choose the sizes for a model and what drafts for it."""
    # asked once: a second answer may differ
    memory = bounded_memory(plan, loader.pool_memory())
    num_blocks = choose_blocks(plan, loader, memory, draft)
    sizes = choose_windows(plan, loader, memory, num_blocks, drafted=draft is not None)
    if sizes.num_window_blocks:
        return sizes
    return sizes._replace(num_host_blocks=host_blocks(plan.settings, loader, num_blocks))


def bounded_memory(plan: LoadPlan, memory: PoolMemory) -> PoolMemory:
    """Return what ``gpu_memory_utilization`` leaves to the KV pool, where it is given: that share
    of what is free, less the model's files, whose size weights have at most in most formats."""
    share = plan.settings.gpu_memory_utilization
    if share is None:
        return memory
    files = sum(path.stat().st_size for path in weight_files(plan.path))
    left = int(memory.free_bytes * share) - files
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization={share:g} of {memory.free_bytes / 2**20:.0f} MiB of free "
            f"memory is less than the model's files, {files / 2**20:.0f} MiB: raise it, or leave "
            "it out"
        )
    return PoolMemory(left, 1.0)


def choose_blocks(
    plan: LoadPlan, loader: ModelLoader, memory: PoolMemory, draft: DraftPlan | None
) -> int:
    """Choose the blocks of the KV pool, after the draft model's blocks and weights are deducted."""
    settings, max_num_seqs = plan.settings, plan.limits.max_num_seqs
    if settings.num_blocks is not None:
        return settings.num_blocks
    if not loader.block_bytes:
        # without a cache, blocks are numbers: enough of them that no prompt waits for one
        return max_num_seqs * -(-plan.max_model_len // settings.block_size)
    return choose_num_blocks(
        settings.kv_cache_bytes,
        block_bytes=loader.block_bytes + (0 if draft is None else draft.block_bytes),
        block_size=settings.block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=plan.max_model_len,
        free_bytes=max(
            0,
            memory.free_bytes
            - settings.adapter_bytes
            - (0 if draft is None else draft.weight_bytes),
        ),
        share=memory.share,
    )


def host_blocks(settings: BackendSettings, loader: ModelLoader, num_blocks: int) -> int:
    """Return the blocks of host memory for swapping, next to ``num_blocks`` of the pool."""
    if not loader.block_bytes:
        return 0
    swap_bytes = settings.swap_bytes
    if swap_bytes is None:
        # the limit may be infinity, which cannot be divided into blocks
        swap_bytes = int(min(num_blocks * loader.block_bytes // 2, loader.max_host_bytes))
    return swap_bytes // loader.block_bytes


def choose_windows(
    plan: LoadPlan, loader: ModelLoader, memory: PoolMemory, num_blocks: int, *, drafted: bool
) -> PoolSizes:
    """Choose the number of window blocks, and of blocks, which may then exceed ``num_blocks``, the
    number that fits into ``memory`` where all layers use them.

    Args:
        drafted: a model or a head drafts, whose cache uses the served model's blocks.
    """
    settings, limits, max_model_len = plan.settings, plan.limits, plan.max_model_len
    if not loader.window:
        return PoolSizes(num_blocks)
    max_num_seqs = limits.max_num_seqs
    off = settings.without_windows
    if settings.swap_bytes:
        off = off or "host memory to swap to takes whole blocks (--swap-space)"
    elif plan.pooling is not None:
        # hidden states are computed from ordinary blocks alone
        off = off or "a pooled model has hidden states of whole prompts"
    elif drafted:
        off = off or "a draft model or head shares its blocks with the model"
    if off:
        return PoolSizes(num_blocks, why=f"{_NONE}: {off}")
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(limits.max_num_batched_tokens, max_num_seqs),
        max_model_len=max_model_len,
    )
    needed = window_blocks_needed(scheduler, loader.window, settings.block_size)
    if needed >= num_blocks:
        off = (
            f"windows of --max-num-seqs {max_num_seqs} would take {needed} blocks, and there are "
            f"{num_blocks}; a smaller --max-num-seqs may help"
        )
        return PoolSizes(num_blocks, why=f"{_NONE}: {off}")
    taken = needed * loader.window_block_bytes
    of_others = loader.block_bytes - loader.window_block_bytes
    if not of_others and settings.num_blocks is None:
        # blocks take no memory, so there may be as many as all requests can use
        largest = max_num_seqs * -(-max_model_len // settings.block_size)
        return PoolSizes(max(num_blocks, largest), needed)
    if settings.num_blocks is not None:
        return PoolSizes(num_blocks, needed)
    kv_cache_bytes = settings.kv_cache_bytes
    fitting = choose_num_blocks(
        None if kv_cache_bytes is None else kv_cache_bytes - taken,
        block_bytes=of_others,
        block_size=settings.block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        free_bytes=max(0, memory.free_bytes - int(taken / memory.share)),
        share=memory.share,
    )
    return PoolSizes(fitting, needed)
