"""Host memory for the blocks of preempted requests, which are restored from there.

This module does not decide which requests are copied, and moves nothing itself: a plan does.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.config import CacheConfig
from paceline.core.memory.block_pool import Pool
from paceline.core.outputs import BlockSwap
from paceline.core.request import Request

__all__ = ["HostBlocks"]


class HostBlocks:
    """Host blocks that hold requests' tokens. Part of ``KVCacheManager``."""

    def __init__(self, config: CacheConfig, pool: Pool) -> None:
        self._pool, self._block_size = pool, config.block_size
        self._count = config.num_host_blocks
        self._free = list(range(self._count - 1, -1, -1))
        # moves that the next plan carries out, in order; public, to be looked at without a call
        self.swaps: list[BlockSwap] = []
        self.num_swapped_out = self.num_swapped_in = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def keep(self, request: Request) -> None:
        """Copy a request's tokens, to at most ``num_free`` blocks, before its own are freed."""
        request.num_swapped_tokens = computed = request.num_computed_tokens
        for block_id in request.block_ids[: -(-computed // self._block_size)]:
            host_id = self._free.pop()
            request.host_block_ids.append(host_id)
            self.swaps.append(BlockSwap(block_id, host_id, True))
            self.num_swapped_out += 1

    def restore(self, request: Request) -> None:
        """Give a request blocks for its copied tokens that are not in a cached prefix."""
        host_ids = request.host_block_ids[len(request.block_ids) :]
        block_ids = self._pool.allocate(len(host_ids))
        moves = zip(host_ids, block_ids, strict=True)
        self.swaps += [BlockSwap(*move, to_host=False) for move in moves]
        self.num_swapped_in += len(host_ids)
        request.block_ids += block_ids
        request.num_computed_tokens = max(request.num_computed_tokens, request.num_swapped_tokens)
        request.history.num_restored_tokens += request.num_swapped_tokens
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Free the host blocks of a request, if it has any."""
        # latest first, so that they are allocated again in the same order
        self._free.extend(reversed(request.host_block_ids))
        request.host_block_ids = []
        request.num_swapped_tokens = 0

    def take_swaps(self) -> tuple[BlockSwap, ...]:
        """Return the moves to carry out before the next plan, once each."""
        swaps, self.swaps = tuple(self.swaps), []
        return swaps

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless each host block is free or holds tokens of one request."""
        known = list(self._free)
        for request in requests:
            tokens, held = request.num_swapped_tokens, request.host_block_ids
            known += held
            found = f"{tokens} swapped tokens in {held}"
            assert len(held) == -(-tokens // self._block_size), f"{request.request_id}: {found}"
        assert sorted(known) == list(range(self._count)), "host blocks are lost"
