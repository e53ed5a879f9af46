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
from paceline.core.memory.outlook import look_ahead
from paceline.core.request import Request
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Displacement", "choose_displaced"]

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
        chosen = choose_displaced(
            head,
            self._state.running.requests,
            displaces,
            self._state.kv,
            self._state.config.max_num_seqs,
            lambda gone, freed: self._lasts_without(head, gone, freed),
        )
        if not chosen:
            return 0
        # no other request takes the room that was made for it
        head.times_bypassed = self._state.config.max_bypasses
        for loser in chosen:
            self._state.running.preempt(loser, now)
        return max(1, self._state.kv.num_lacking(head))

    def _lasts_without(self, head: Request, gone: Sequence[Request], freed: int) -> bool:
        """Whether memory is predicted to last with ``head`` and without some running requests,
        which give so many blocks back."""
        running = self._state.running.requests
        if not self._state.config.future_memory_check or len(gone) == len(running):
            return True
        names = {request.request_id for request in gone}
        rest = [r for r in running if r.request_id not in names]
        counted = rest
        if head.tier is Tier.ORDINARY:
            counted = [request for request in rest if request.tier is Tier.ORDINARY]
        outlook = look_ahead(self._state.kv, self._state.work, counted, freed)
        # what they alone hold of its prompt comes free with them
        num_shared = self._state.kv.num_in_use(head, gone)
        if not outlook.admits(head, num_shared):
            return False
        # rows of this step come before it, and take blocks
        num_free = self._state.kv.pool.num_free + freed - sum(map(self._state.kv.num_missing, rest))
        outlook.hold(self._state.cache.num_blocks - num_free)
        return outlook.admits(head, num_shared)


def choose_displaced(
    head: Request,
    running: Sequence[Request],
    displaces: Displaces,
    kv: KVCacheManager,
    max_num_seqs: int,
    lasts: Callable[[Sequence[Request], int], bool],
) -> list[Request]:
    """The fewest of ``running``, worst first, whose preemption lets ``head`` in.

    Empty when none stands in its way, or when even preempting all that it ``displaces`` would not
    make room: no request is preempted in vain. ``running`` is in the policy's order.

    Args:
        lasts: whether memory is predicted to last with ``head`` and without some of ``running``,
            which give so many blocks back. The more go, the longer it lasts.
    """
    # worst first; none that comes before it
    later = running[bisect_right(running, head.order, key=_ORDER) :]
    losers = [request for request in reversed(later) if displaces(head, request)]
    shortfall = kv.shortfall(head, beside_others=True) if losers else 0
    slots = max_num_seqs - len(running)
    if slots > 0 and shortfall == 0 and head.tier is Tier.ORDINARY:
        # nothing but predicted memory can be short, which counts on best effort making way later
        losers = [request for request in losers if request.tier is Tier.ORDINARY]
    # asked in every step in which a request waits: whether all of them together would do is found
    # out first, before blocks are counted
    if not losers or not lasts(losers, sum(len(request.block_ids) for request in losers)):
        return []
    counting = _freed_blocks(head, losers, kv)
    freed: list[int] = []
    for blocks in counting:
        freed.append(blocks)
        if slots + len(freed) > 1 and blocks >= shortfall:
            break
    else:
        return []
    return losers[: _fewest(losers, freed, counting, lasts)]


def _fewest(
    losers: Sequence[Request],
    freed: list[int],
    counting: Iterator[int],
    lasts: Callable[[Sequence[Request], int], bool],
) -> int:
    """How many have to go for memory to last, if ``len(freed) - 1`` make room for now; 0: not even
    all of them would do.

    Args:
        counting: goes on where ``freed`` ends.
    """
    least = len(freed) - 1
    if lasts(losers[:least], freed[least]):
        return least
    freed += counting
    if least == len(losers) or not lasts(losers, freed[-1]):
        return 0
    counts = range(least + 1, len(losers) + 1)
    return counts[bisect_left(counts, True, key=lambda n: lasts(losers[:n], freed[n]))]


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
