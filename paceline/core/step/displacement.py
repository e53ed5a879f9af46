"""Who must go so that a better request can run."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.request import Request

__all__ = ["choose_displaced"]


def choose_displaced(
    head: Request,
    running: Sequence[Request],
    displaces: Callable[[Request, Request], bool],
    kv: KVCacheManager,
    max_num_seqs: int,
    lasts: Callable[[Sequence[Request], int], bool],
) -> list[Request]:
    """The fewest of ``running``, worst first, whose preemption lets ``head`` in.

    Empty when nobody stands in its way, or when even preempting all whom it ``displaces`` would not
    make room: nobody is preempted in vain. ``running`` is in the policy's order.

    Args:
        lasts: whether memory is predicted to last with ``head`` and without some of ``running``,
            who give so many blocks back. The more go, the longer it lasts.
    """
    # worst first
    losers = [request for request in reversed(running) if displaces(head, request)]
    shortfall = kv.shortfall(head, beside_others=True)
    slots = max_num_seqs - len(running)
    if slots > 0 and shortfall == 0 and not head.best_effort:
        # nothing but predicted memory can be short, which counts on best effort making way later
        losers = [request for request in losers if not request.best_effort]
    # asked in every step in which somebody waits: who would not be let in whoever made way is found
    # out first, before blocks are counted
    if not losers or not lasts(losers, sum(len(request.block_ids) for request in losers)):
        return []
    # a block comes free with the last of its holders, unless the head is about to hold it
    wanted = set(kv.starting_blocks(head))
    holders: Counter[int] = Counter()
    # by the first of the losers, how many of them
    freed = [0]

    def go_on() -> None:
        block_ids = losers[len(freed) - 1].block_ids
        holders.update(block_ids)
        count = sum(
            kv.pool.ref_count(block_id) == holders[block_id] and block_id not in wanted
            for block_id in block_ids
        )
        freed.append(freed[-1] + count)

    while len(freed) <= len(losers) and (slots + len(freed) <= 1 or freed[-1] < shortfall):
        go_on()
    least = len(freed) - 1
    if slots + least <= 0 or freed[-1] < shortfall:
        return []
    if lasts(losers[:least], freed[least]):
        return losers[:least]
    while len(freed) <= len(losers):
        go_on()
    if least == len(losers) or not lasts(losers, freed[-1]):
        return []
    counts = range(least + 1, len(losers) + 1)
    more = bisect_left(counts, True, key=lambda count: lasts(losers[:count], freed[count]))
    return losers[: counts[more]]
