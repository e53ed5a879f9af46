"""Running requests, in order; victims when memory is short, and what is kept of their tokens.

The blocks of a preempted request go back to the pool with their hashes, tail first to be evicted.
So only the tail that other requests really needed is lost, and the rest is found again (partial
release). A copy is kept in host memory if that is predicted to be quicker.

This module does not know which requests should run, or whose row lacks blocks.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.interface import KVCache
from paceline.core.memory.kv_cache import blocks_for
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.queues.waiting import WaitingQueues
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Tier

__all__ = ["RunningList", "place"]

# moving must be cheaper than computing again by this factor, as predictions are not exact
_MARGIN: Final = 1.25


def place(request: Request) -> tuple[bool, tuple[float, int]]:
    """Return the sort key of running requests: best effort comes after all others."""
    return request.tier is not Tier.ORDINARY, request.order


class RunningList:
    """The only place where requests begin to run, are preempted, and stop."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv: KVCache,
        waiting: WaitingQueues,
        work: WorkEstimator,
    ) -> None:
        self._mode, self._cache = config.preemption, cache
        self._kv, self._waiting, self._work = kv, waiting, work
        # sorted by ``place``; always the same list object
        self.requests: list[Request] = []
        # most tokens that running requests of each tier may occupy; each last block counts as full
        self.most_tokens = [0] * len(Tier)
        # requests whose backend state is to be dropped by the next plan
        self._released: list[str] = []
        self.num_preemptions = 0
        # requests in the list that have ended
        self._num_ended = 0

    def start(self, request: Request) -> None:
        """Add an admitted request, which has its blocks."""
        request.status = RequestStatus.RUNNING
        request.timeline_sent = False
        self.most_tokens[request.tier] += request.max_total_tokens + self._cache.block_size
        insort(self.requests, request, key=place)

    def preempt(self, request: Request, now: float) -> None:
        """Make a request wait without blocks, and keep a copy in host memory if that pays."""
        # unverified tokens are not kept
        request.num_computed_tokens -= request.num_draft_tokens
        request.num_draft_tokens = 0
        request.history.num_lost_tokens = request.num_computed_tokens
        moved, computed = self._seconds(request)
        if moved < math.inf and (self._mode == "swap" or moved * _MARGIN < computed):
            self._kv.host.keep(request)
        self._kv.free(request)
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        request.granted = request.keeps_slot = False
        self.requests.remove(request)
        self.most_tokens[request.tier] -= request.max_total_tokens + self._cache.block_size
        self._released.append(request.request_id)
        self._waiting.enter(request, now)

    def stop(self, request: Request) -> None:
        """Mark the request's end; it stays in the list until ``prune`` is called."""
        self._released.append(request.request_id)
        self.most_tokens[request.tier] -= request.max_total_tokens + self._cache.block_size
        self._num_ended += 1

    def prune(self) -> None:
        """Drop ended requests: all at once, as many of hundreds may end together."""
        if self._num_ended:
            self._num_ended, running = 0, RequestStatus.RUNNING
            self.requests[:] = [r for r in self.requests if r.status is running]

    def move(self, request: Request, change: Callable[[Request], None]) -> None:
        """Change a running request's tier or order, and sort it in again."""
        most = request.max_total_tokens + self._cache.block_size
        self.requests.remove(request)
        self.most_tokens[request.tier] -= most
        change(request)
        self.most_tokens[request.tier] += most
        insort(self.requests, request, key=place)

    def take_released(self) -> tuple[str, ...]:
        """Return requests whose backend state is to be dropped, once each."""
        released, self._released = tuple(self._released), []
        return released

    def victim(
        self,
        candidates: Sequence[Request],
        expendable: Callable[[Sequence[Request]], Sequence[Request]],
    ) -> Request:
        """Return the request that gives up its blocks: of the policy's ``expendable`` ones, the one
        that loses least. The first of the candidates, which are in order and not empty, is spared
        unless it is alone, so that one request always gets on."""
        if len(candidates) == 1:
            return candidates[0]
        # among equals, the youngest
        return min(reversed(expendable(candidates[1:])), key=self.seconds_lost)

    def seconds_lost(self, request: Request) -> float:
        """Return the later cost of preempting a request now, times 1 + its preemptions so far."""
        return min(self._seconds(request)) * (1 + request.num_preemptions)

    def _seconds(self, request: Request) -> tuple[float, float]:
        """Return the seconds to move a request's computed tokens twice, and to recompute them."""
        computed = request.num_computed_tokens
        num_blocks, moved = blocks_for(computed, self._cache.block_size), math.inf
        if self._mode != "recompute" and 0 < num_blocks <= self._kv.host.num_free:
            moved = 2.0 * self._cache.swap_block_seconds * num_blocks
        return moved, self._work.prompt_seconds(computed)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the list is in order and sums agree."""
        running, size = self.requests, self._cache.block_size
        assert running == sorted(running, key=place), "running is out of order"
        for tier, most in enumerate(self.most_tokens):
            own = [r.max_total_tokens + size for r in running if r.tier == tier]
            assert sum(own) == most, f"tier {tier}: {most} tokens at most, {sum(own)} counted"
