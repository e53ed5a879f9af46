"""Which request gives way when memory is short, and what becomes of what it had computed.

A victim's blocks go back to the pool with their hashes, tail first to be evicted. So what is lost
is the tail that others really needed, and the rest is found again (partial release). Where there is
room in host memory, a copy is kept there if moving it twice is predicted to take less time
than computing it again.

This module does not know queues or the order of requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager, blocks_for
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.request import Request

__all__ = ["Preemption"]

# moving must be this much cheaper than computing again: predictions are only so good
_MARGIN = 1.25


class Preemption:
    """Chooses victims and swaps them out. Owned by the running list.

    Args:
        work: seconds that computing tokens takes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv: KVCacheManager,
        work: WorkEstimator,
    ) -> None:
        self._mode = config.preemption
        self._cache = cache
        self._kv = kv
        self._work = work

    def seconds_lost(self, request: Request) -> float:
        """What preempting a request now would cost later: moving it twice or computing it again,
        and more the more often it happened to it."""
        return min(self._seconds(request)) * (1 + request.num_preemptions)

    def victim(
        self,
        candidates: Sequence[Request],
        choose: Callable[[Sequence[Request]], Sequence[Request]],
    ) -> Request:
        """The request that gives blocks up: of those that the policy would rather lose, the one
        that loses least.

        Args:
            candidates: running requests in the policy's order, not empty. The first is spared
                unless it is alone, so that one request always gets on.
            choose: the policy's ``expendable``.
        """
        if len(candidates) == 1:
            return candidates[0]
        expendable = choose(candidates[1:])
        # the youngest of equals
        return min(reversed(expendable), key=self.seconds_lost)

    def release(self, request: Request) -> None:
        """Take all blocks; keep a copy in host memory if that is worth it."""
        # what is not known to be right is not kept
        request.num_computed_tokens -= request.num_draft_tokens
        request.num_draft_tokens = 0
        request.history.num_lost_tokens = request.num_computed_tokens
        moved, computed = self._seconds(request)
        if moved < math.inf and (self._mode == "swap" or moved * _MARGIN < computed):
            self._kv.swap_out(request)
        self._kv.free(request)

    def _seconds(self, request: Request) -> tuple[float, float]:
        """Of moving what a request has computed twice (infinite: it cannot be moved), and of
        computing it again."""
        computed = request.num_computed_tokens
        num_blocks, moved = blocks_for(computed, self._cache.block_size), math.inf
        if self._mode != "recompute" and 0 < num_blocks <= self._kv.num_free_host_blocks:
            moved = 2.0 * self._cache.swap_block_seconds * num_blocks
        return moved, self._work.prompt_seconds(computed)
