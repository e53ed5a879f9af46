"""Preemption of running requests so that a better waiting request can run.

This module does not decide which of two requests is better.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from paceline.core.queues.running import place
from paceline.core.request import Request
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["displace"]

# (waiting, running): whether the second is preempted to admit the first
Displaces = Callable[[Request, Request], bool]


def displace(state: SchedulerState, head: Request, now: float, displaces: Displaces) -> int:
    """Preempt the running requests that keep ``head`` out, the first waiting request, if nothing
    but slots and memory is known to keep it out. Returns the tokens that it lacks, to be kept for
    it in this step; 0: none was preempted."""
    if head.num_pending_tokens:
        # it is ready once its token is known
        return 0
    running = state.running.requests
    # worst first, and only requests that come after ``head``
    later = reversed(running[bisect_right(running, place(head), key=place) :])
    losers = _fewest(state, head, [request for request in later if displaces(head, request)])
    if not losers:
        return 0
    # no other request may take the capacity that was freed for it
    head.times_skipped = state.config.max_skips
    for loser in losers:
        state.running.preempt(loser, now)
    return max(1, state.kv.num_lacking(head))


def _fewest(state: SchedulerState, head: Request, losers: Sequence[Request]) -> Sequence[Request]:
    """Return the first of ``losers`` that must go for ``head`` to have a slot and blocks now, and
    as predicted. Empty when none keeps it out, or when even all of them would not free enough."""
    shortfall = state.kv.shortfall(head, beside_others=True) if losers else 0
    slots = state.config.max_num_seqs - len(state.running.requests)
    if slots > 0 and shortfall == 0 and head.tier is Tier.ORDINARY:
        # only predicted memory can be short, for which best effort is preempted later
        losers = [request for request in losers if request.tier is Tier.ORDINARY]
    # whether all of them together suffice is checked first, as counting blocks takes longer
    most = sum(len(request.block_ids) for request in losers)
    if not losers or not _lasts_without(state, losers, most, head):
        return ()
    freed: list[int] = []
    for blocks in (counting := state.kv.num_freed(head, losers)):
        freed.append(blocks)
        if slots + len(freed) > 1 and blocks >= shortfall:
            # these free enough for now
            break
    else:
        return ()

    def lasts(num: int) -> bool:
        return _lasts_without(state, losers[:num], freed[num], head)

    if lasts(least := len(freed) - 1):
        return losers[:least]
    freed += counting
    # the more requests go, the longer memory lasts
    enough = bisect_left(range(least + 1, len(freed)), True, key=lasts) + least + 1
    return losers[:enough] if enough < len(freed) else ()


def _lasts_without(
    state: SchedulerState, gone: Sequence[Request], freed: int, head: Request
) -> bool:
    """Whether memory is predicted to last with ``head`` and the ``freed`` blocks of those gone."""
    running = state.running.requests
    if not state.config.future_memory_check or len(gone) == len(running):
        return True
    names = {request.request_id for request in gone}
    rest = [request for request in running if request.request_id not in names]
    outlook = state.outlook(head.tier, rest, freed)
    # blocks of its prompt that only the losers hold are freed with them
    num_shared = state.kv.num_in_use(head, gone)
    if not outlook.admits(head, num_shared):
        return False
    # rows of this step come before ``head``, and take blocks
    num_free = state.kv.pool.num_free + freed - sum(map(state.kv.num_missing, rest))
    outlook.hold(state.cache.num_blocks - num_free)
    return outlook.admits(head, num_shared)
