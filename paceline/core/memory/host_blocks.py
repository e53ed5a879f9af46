"""Copies in host memory of the blocks of preempted requests, which get them back from there.

This module does not decide which requests are copied (``queues.running``), and moves nothing
itself: what it orders is part of the next plan.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.config import CacheConfig
from paceline.core.memory.block_pool import BlockPool
from paceline.core.outputs import BlockSwap
from paceline.core.request import Request

__all__ = ["HostBlocks"]


class HostBlocks:
    """Which host blocks hold which request's tokens. Part of ``KVCacheManager``."""

    def __init__(self, config: CacheConfig, pool: BlockPool) -> None:
        self._pool, self._block_size = pool, config.block_size
        self._count = config.num_host_blocks
        self._free = list(range(self._count - 1, -1, -1))
        # moves that the next plan has to carry out, in order; others may look at them: there are
        # none in most steps, and a plain step makes no call
        self.swaps: list[BlockSwap] = []
        self.num_swapped_out = 0
        self.num_swapped_in = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def keep(self, request: Request) -> None:
        """Copy what a running request has computed, before its blocks are freed. The caller has
        checked ``num_free``; IndexError otherwise."""
        request.num_swapped_tokens = computed = request.num_computed_tokens
        for block_id in request.block_ids[: -(-computed // self._block_size)]:
            host_id = self._free.pop()
            request.host_block_ids.append(host_id)
            self.swaps.append(BlockSwap(block_id, host_id, True))
            self.num_swapped_out += 1

    def restore(self, request: Request) -> None:
        """Give a request that starts with the cached part of its tokens blocks for the rest of
        those that were copied too, and forget the copies."""
        host_ids = request.host_block_ids[len(request.block_ids) :]
        block_ids = self._pool.allocate(len(host_ids))
        self.swaps += [
            BlockSwap(*each, to_host=False) for each in zip(host_ids, block_ids, strict=True)
        ]
        self.num_swapped_in += len(host_ids)
        request.block_ids += block_ids
        request.num_computed_tokens = max(request.num_computed_tokens, request.num_swapped_tokens)
        request.history.num_restored_tokens += request.num_swapped_tokens
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Give back what holds a request's copies, if there are any."""
        # latest first, so that they are handed out again in the same order
        self._free.extend(reversed(request.host_block_ids))
        request.host_block_ids = []
        request.num_swapped_tokens = 0

    def take_swaps(self) -> tuple[BlockSwap, ...]:
        """Moves to be carried out before the next plan, once each."""
        swaps, self.swaps = tuple(self.swaps), []
        return swaps

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """AssertionError unless each host block is free or holds tokens of one request."""
        known = list(self._free)
        for request in requests:
            tokens, held = request.num_swapped_tokens, request.host_block_ids
            known += held
            assert len(held) == -(-tokens // self._block_size), (
                f"request {request.request_id}: {tokens} swapped tokens in {held}"
            )
        assert sorted(known) == list(range(self._count)), "host blocks are lost"
