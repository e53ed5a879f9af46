"""Division of memory between blocks and window blocks, or the reason for no window blocks."""

from __future__ import annotations

from typing import NamedTuple

from paceline.backends.loading.settings import BackendSettings
from paceline.backends.machine.cpu import choose_num_blocks
from paceline.backends.runner.interface import ModelLoader
from paceline.core.config import SchedulerConfig
from paceline.core.memory.windows import window_blocks_needed

__all__ = ["WindowChoice", "choose_windows"]

_NONE = "layers with a sliding window keep the keys and values of whole requests"


class WindowChoice(NamedTuple):
    """Blocks for layers with a sliding window and for the others."""

    # 0: layers with a window use ordinary blocks
    num_window_blocks: int
    # ordinary blocks that fit into memory with them; without window blocks, as many as before
    num_blocks: int
    # reason for no window blocks, for users; empty where there are some or no layer needs them
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
    """Choose the number of window blocks, and of blocks, which may then exceed ``num_blocks``, the
    number that fits where all layers use them.

    Args:
        limits: the scheduler's ``max_num_seqs`` and ``max_num_batched_tokens``.
        memory: result of ``loader.pool_memory`` when ``num_blocks`` was chosen.
        pooled: hidden states are asked for, which are computed from ordinary blocks alone.
        drafted: a model or a head guesses, whose cache uses the served model's blocks.
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
        # blocks take no memory, so there may be as many as all requests can use
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
