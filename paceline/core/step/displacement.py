"""Which running requests are preempted so that a better one that waits can run.

This module does not decide which of two requests is better.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Final

from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.request import Request
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Displacement"]

_ORDER: Final = attrgetter("order")

# (waiting, running): whether the second is preempted to admit the first
Displaces = Callable[[Request, Request], bool]


class Displacement:
    """Makes way for the first waiting request, whose obstacles beside room are known to be none."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def make_way(self, head: Request, now: float, displaces: Displaces) -> int:
        """Preempt the running requests that stand in the way of ``head``, if any do.

        Returns the tokens which that one lacks, to be kept for it in this step; 0: none went.
        """
        if head.num_pending_tokens:
            # it is ready once its token is known
            return 0
        chosen = self._choose(head, displaces)
        if not chosen:
            return 0
        # no other request takes the room that was made for it
        head.times_bypassed = self._state.config.max_bypasses
        for loser in chosen:
            self._state.running.preempt(loser, now)
        return max(1, self._state.kv.num_lacking(head))

    def _choose(self, head: Request, displaces: Displaces) -> Sequence[Request]:
        """The fewest running requests, worst first, whose preemption lets ``head`` in.

        Empty when none stands in its way, or when even preempting all that it ``displaces`` would
        not make room: no request is preempted in vain.
        """
        state, running = self._state, self._state.running.requests
        # worst first; none that comes before it
        later = running[bisect_right(running, head.order, key=_ORDER) :]
        losers = [request for request in reversed(later) if displaces(head, request)]
        shortfall = state.kv.shortfall(head, beside_others=True) if losers else 0
        slots = state.config.max_num_seqs - len(running)
        if slots > 0 and shortfall == 0 and head.tier is Tier.ORDINARY:
            # nothing but predicted memory can be short, where best effort makes way later
            losers = [request for request in losers if request.tier is Tier.ORDINARY]
        # asked in every step in which a request waits: whether all of them together would do is
        # found out first, before blocks are counted
        all_blocks = sum(len(request.block_ids) for request in losers)
        if not losers or not self._lasts_without(losers, all_blocks, head):
            return ()
        return self._fewest(head, losers, slots, shortfall)

    def _fewest(
        self, head: Request, losers: Sequence[Request], slots: int, shortfall: int
    ) -> Sequence[Request]:
        """The first of ``losers`` that have to go for ``head`` to have a place and blocks now, and
        for memory to last."""
        counting = _freed_blocks(head, losers, self._state.kv)
        freed: list[int] = []
        for blocks in counting:
            freed.append(blocks)
            if slots + len(freed) > 1 and blocks >= shortfall:
                break
        else:
            return ()

        def lasts(num: int) -> bool:
            return self._lasts_without(losers[:num], freed[num], head)

        # so many make room for now
        least = len(freed) - 1
        if lasts(least):
            return losers[:least]
        freed += counting
        if least == len(losers) or not lasts(len(losers)):
            return ()
        counts = range(least + 1, len(losers) + 1)
        return losers[: counts[bisect_left(counts, True, key=lasts)]]

    def _lasts_without(self, gone: Sequence[Request], freed: int, head: Request) -> bool:
        """Whether memory is predicted to last with ``head`` and without some running requests,
        which give so many blocks back. The more go, the longer it lasts."""
        state, running = self._state, self._state.running.requests
        if not state.config.future_memory_check or len(gone) == len(running):
            return True
        names = {request.request_id for request in gone}
        rest = [request for request in running if request.request_id not in names]
        outlook = state.outlook(head.tier, rest, freed)
        # what they alone hold of its prompt comes free with them
        num_shared = state.kv.num_in_use(head, gone)
        if not outlook.admits(head, num_shared):
            return False
        # rows of this step come before it, and take blocks
        num_free = state.kv.pool.num_free + freed - sum(map(state.kv.num_missing, rest))
        outlook.hold(state.cache.num_blocks - num_free)
        return outlook.admits(head, num_shared)


def _freed_blocks(head: Request, losers: Sequence[Request], kv: KVCacheManager) -> Iterator[int]:
    """Blocks that come free if the first 0, 1, 2, ... of ``losers`` go. A block comes free with the
    last of its holders, unless ``head`` is about to hold it."""
    wanted = set(kv.starting_blocks(head))
    holders: Counter[int] = Counter()
    freed = 0
    yield freed
    for loser in losers:
        holders.update(loser.block_ids)
        freed += sum(
            kv.pool.ref_count(block_id) == holders[block_id] and block_id not in wanted
            for block_id in loser.block_ids
        )
        yield freed
