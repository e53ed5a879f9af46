"""Running requests, in order; which of them gives way when memory is short, and what becomes of
what it had computed.

The blocks of a preempted request go back to the pool with their hashes, tail first to be evicted.
So what is lost is the tail that others really needed, and the rest is found again (partial
release). Where there is room in host memory, a copy is kept there if moving it twice is predicted
to take less time than computing it again.

This module does not know which requests should run, or whose row lacks blocks.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager, blocks_for
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Tier

__all__ = ["RunningList", "place"]

# moving must be this much cheaper than computing again: predictions are only so good
_MARGIN: Final = 1.25


def place(request: Request) -> tuple[bool, tuple[float, int]]:
    """What running requests are sorted by: best effort comes after all others."""
    return request.tier is not Tier.ORDINARY, request.order


class RunningList:
    """The only place where requests begin to run, are preempted, and stop.

    Args:
        waiting: where preempted requests wait again.
        work: seconds that computing tokens takes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv: KVCacheManager,
        waiting: WaitingRoom,
        work: WorkEstimator,
    ) -> None:
        self._mode, self._cache = config.preemption, cache
        self._kv, self._waiting, self._work = kv, waiting, work
        # sorted by ``place``; the list stays the same one
        self.requests: list[Request] = []
        # tokens whose place running requests of a tier may take at most, the last block of each as
        # if it were full
        self.most_tokens = [0] * len(Tier)
        # requests whose backend state is to be dropped by the next plan
        self._released: list[str] = []
        self.num_preemptions = 0
        # requests in the list that have ended
        self._num_ended = 0

    def start(self, request: Request) -> None:
        """The request was admitted and has its blocks."""
        request.status = RequestStatus.RUNNING
        request.told = False
        self.most_tokens[request.tier] += request.max_total_tokens + self._cache.block_size
        insort(self.requests, request, key=place)

    def preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks, and keep a copy in host memory if that is worth it; the
        request waits again at its place in the order."""
        # what is not known to be right is not kept
        request.num_computed_tokens -= request.num_draft_tokens
        request.num_draft_tokens = 0
        request.history.num_lost_tokens = request.num_computed_tokens
        moved, computed = self._seconds(request)
        if moved < math.inf and (self._mode == "swap" or moved * _MARGIN < computed):
            self._kv.host.keep(request)
        self._kv.free(request)
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.status, request.granted = RequestStatus.WAITING, False
        self.requests.remove(request)
        self.most_tokens[request.tier] -= request.max_total_tokens + self._cache.block_size
        self._released.append(request.request_id)
        self._waiting.enter(request, now)

    def stop(self, request: Request) -> None:
        """The request ends; it stays in the list until ``prune`` is called."""
        self._released.append(request.request_id)
        self.most_tokens[request.tier] -= request.max_total_tokens + self._cache.block_size
        self._num_ended += 1

    def prune(self) -> None:
        """Forget requests that have ended: all at once, for many of hundreds may end together."""
        if self._num_ended:
            self._num_ended, running = 0, RequestStatus.RUNNING
            self.requests[:] = [r for r in self.requests if r.status is running]

    def move(self, request: Request, change: Callable[[Request], None]) -> None:
        """Change a running request's tier or order, and put it at its new place."""
        most = request.max_total_tokens + self._cache.block_size
        self.requests.remove(request)
        self.most_tokens[request.tier] -= most
        change(request)
        self.most_tokens[request.tier] += most
        insort(self.requests, request, key=place)

    def take_released(self) -> tuple[str, ...]:
        """Requests whose backend state is to be dropped, once each."""
        released, self._released = tuple(self._released), []
        return released

    # ------------------------------------------------------------------ victims

    def victim(
        self,
        candidates: Sequence[Request],
        expendable: Callable[[Sequence[Request]], Sequence[Request]],
    ) -> Request:
        """The request that gives blocks up: of those that the policy would rather lose, the one
        that loses least.

        Args:
            candidates: running requests in the policy's order, not empty. The first is spared
                unless it is alone, so that one request always gets on.
            expendable: the policy's.
        """
        if len(candidates) == 1:
            return candidates[0]
        # the youngest of equals
        return min(reversed(expendable(candidates[1:])), key=self.seconds_lost)

    def seconds_lost(self, request: Request) -> float:
        """What preempting a request now would cost later: moving it twice or computing it again,
        and more the more often it happened to it."""
        return min(self._seconds(request)) * (1 + request.num_preemptions)

    def _seconds(self, request: Request) -> tuple[float, float]:
        """Of moving what a request has computed twice (infinite: it cannot be moved), and of
        computing it again."""
        computed = request.num_computed_tokens
        num_blocks, moved = blocks_for(computed, self._cache.block_size), math.inf
        if self._mode != "recompute" and 0 < num_blocks <= self._kv.host.num_free:
            moved = 2.0 * self._cache.swap_block_seconds * num_blocks
        return moved, self._work.prompt_seconds(computed)

    def check_integrity(self) -> None:
        """AssertionError unless the list is in order and sums agree."""
        running, size = self.requests, self._cache.block_size
        assert running == sorted(running, key=place), "running is out of order"
        for tier, most in enumerate(self.most_tokens):
            own = [r.max_total_tokens + size for r in running if r.tier == tier]
            assert sum(own) == most, f"tier {tier}: {most} tokens at most, {sum(own)} counted"
