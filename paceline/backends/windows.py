"""How memory is divided between blocks and window blocks, or why a model has none of these."""

from __future__ import annotations

from typing import NamedTuple

from paceline.backends.machine import choose_num_blocks
from paceline.backends.settings import BackendSettings
from paceline.backends.steps import ModelLoader
from paceline.core.config import SchedulerConfig
from paceline.core.memory.windows import window_blocks_needed

__all__ = ["WindowChoice", "choose_windows"]

_NONE = "layers with a sliding window keep the keys and values of whole requests"


class WindowChoice(NamedTuple):
    """What layers with a sliding window get."""

    # 0: these layers use the others' blocks
    num_window_blocks: int
    # blocks of the other layers that memory has room for beside them, or those there were
    num_blocks: int
    # for people: why there are none; empty where there are, or the model has no such layers
    why: str = ""


def choose_windows(
    loader: ModelLoader,
    settings: BackendSettings,
    limits: tuple[int, int],
    max_model_len: int,
    num_blocks: int,
    memory: tuple[int, float],
    *,
    pooled: bool = False,
    drafted: bool = False,
) -> WindowChoice:
    """Window blocks, and the blocks that memory then has room for, where that is more than
    ``num_blocks``, those of all layers.

    Args:
        limits: the scheduler's ``max_num_seqs`` and ``max_num_batched_tokens``.
        memory: what ``loader.pool_memory`` said when ``num_blocks`` were chosen.
        pooled: hidden states are asked for, which are computed from the others' blocks alone.
        drafted: a model or a head guesses, whose cache has the served one's blocks.
    """
    if not loader.window:
        return WindowChoice(0, num_blocks)
    max_num_seqs, max_num_batched_tokens = limits
    off = settings.without_windows
    if settings.swap_bytes:
        off = off or "host memory to swap to takes whole blocks (--swap-space)"
    elif pooled:
        off = off or "a pooled model has hidden states of whole prompts"
    elif drafted:
        off = off or "a draft model or head shares its blocks with the model"
    if off:
        return WindowChoice(0, num_blocks, f"{_NONE}: {off}")
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        max_model_len=max_model_len,
    )
    needed = window_blocks_needed(scheduler, loader.window, settings.block_size)
    if needed >= num_blocks:
        off = (
            f"windows of --max-num-seqs {max_num_seqs} would take {needed} blocks, and there are "
            f"{num_blocks}; a smaller --max-num-seqs may help"
        )
        return WindowChoice(0, num_blocks, f"{_NONE}: {off}")
    taken = needed * loader.window_block_bytes
    of_others = loader.block_bytes - loader.window_block_bytes
    if not of_others and settings.num_blocks is None:
        # blocks are numbers, of which there may be as many as all requests can use
        largest = max_num_seqs * -(-max_model_len // settings.block_size)
        return WindowChoice(needed, max(num_blocks, largest))
    if settings.num_blocks is not None:
        return WindowChoice(needed, num_blocks)
    free_bytes, share = memory
    kv_cache_bytes = settings.kv_cache_bytes
    return WindowChoice(
        needed,
        choose_num_blocks(
            None if kv_cache_bytes is None else kv_cache_bytes - taken,
            block_bytes=of_others,
            block_size=settings.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            free_bytes=max(0, free_bytes - int(taken / share)),
            share=share,
        ),
    )
