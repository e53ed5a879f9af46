"""Who must go so that a better request can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from paceline.core.kv_cache import KVCacheManager
from paceline.core.request import Request

__all__ = ["choose_displaced"]


def choose_displaced(
    head: Request,
    running: Sequence[Request],
    displaces: Callable[[Request, Request], bool],
    kv: KVCacheManager,
    max_num_seqs: int,
) -> list[Request]:
    """The fewest of ``running``, worst first, whose preemption lets ``head`` in.

    Empty when nobody stands in its way, or when even preempting all whom it ``displaces`` would not
    make room: nobody is preempted in vain. ``running`` is in the policy's order.
    """
    shortfall = kv.shortfall(head, beside_others=True)
    slots = max_num_seqs - len(running)
    if slots > 0 and shortfall == 0:
        return []
    losers = [request for request in running if displaces(head, request)]
    # a block comes free with the last of its holders, unless the head is about to hold it
    wanted = set(kv.starting_blocks(head))
    holders: Counter[int] = Counter()
    chosen: list[Request] = []
    while losers and (slots <= 0 or shortfall > 0):
        loser = losers.pop()
        chosen.append(loser)
        slots += 1
        holders.update(loser.block_ids)
        shortfall -= sum(
            kv.pool.ref_count(block_id) == holders[block_id] and block_id not in wanted
            for block_id in loser.block_ids
        )
    return chosen if slots > 0 and shortfall <= 0 else []
