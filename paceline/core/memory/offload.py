"""Blocks of waiting requests: those that forks hold, and those fetched back from the host early.

A preempted request's blocks may lie in host memory. While others run, the blocks of the requests
that come next are moved back ahead of their admission, as far as there is room that neither earlier
requests nor running ones are about to need. The copies on the host stay until admission, so the
blocks can be taken away again whenever another request lacks them.

This module does not know the order of waiting requests: the callers hand them over in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.memory.kv_cache import KVCacheManager, blocks_for
from paceline.core.request import Request

__all__ = ["Offload"]


class Offload:
    """Waiting requests that hold blocks or have a copy on the host. Owned by the waiting room."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        # requests that hold blocks: forks, and those whose swapped blocks were fetched ahead
        self._holders: dict[str, Request] = {}
        # requests with blocks on the host that may be fetched ahead, once: not to and fro
        self._swapped: dict[str, Request] = {}

    def enter(self, request: Request) -> None:
        """The request waits from now on."""
        if request.block_ids:
            self._holders[request.request_id] = request
        elif request.num_swapped_tokens and not request.was_fetched:
            self._swapped[request.request_id] = request

    def leave(self, request: Request) -> None:
        """The request waits no more."""
        self._holders.pop(request.request_id, None)
        self._swapped.pop(request.request_id, None)

    @property
    def has_swapped(self) -> bool:
        """Whether there is anything to fetch."""
        return bool(self._swapped)

    def prefetch(self, upcoming: Iterable[Request], spared: int, max_tokens: int) -> None:
        """Fetch the swapped blocks of the requests that come next.

        Args:
            upcoming: waiting requests in the order in which they are likely to be admitted.
            spared: free blocks left to running requests, so that none of the fetched blocks has to
                be taken back before each of these has filled one more.
            max_tokens: no more are moved, unless the first request has more.
        """
        size, moved = self._kv.block_size, 0
        for request in upcoming:
            needed = blocks_for(request.num_tokens, size)
            if request.request_id not in self._swapped or request.num_pending_tokens:
                spared += max(0, needed - len(request.block_ids))
                continue
            moved += request.num_swapped_tokens
            if moved > max(max_tokens, request.num_swapped_tokens) or not self._kv.prefetch(
                request, spared
            ):
                break
            del self._swapped[request.request_id]
            self._holders[request.request_id] = request
            spared += needed - len(request.block_ids)

    def make_room(self, head: Request, *, beside_others: bool) -> None:
        """Take fetched blocks back from requests behind ``head``, if that is what it lacks: it
        arrived, or came to the front, after they were fetched."""
        fetched = [request for request in self._fetched() if request is not head]
        shortfall = self._kv.shortfall(head, beside_others=beside_others)
        if shortfall > sum(request.num_fetched_blocks for request in fetched):
            return
        while shortfall > 0:
            self._drop(fetched.pop())
            shortfall = self._kv.shortfall(head, beside_others=beside_others)

    def drop_blocks(self) -> bool:
        """Take blocks back from waiting requests; True if any held some. Of the requests whose
        blocks were fetched ahead the last in order alone: call it again while that does not do."""
        fetched = self._fetched()
        if fetched:
            self._drop(fetched[-1])
            return True
        holders = list(self._holders.values())
        for request in holders:
            self._drop(request)
        return bool(holders)

    def _fetched(self) -> list[Request]:
        """Requests whose blocks were fetched ahead, in order."""
        fetched = [request for request in self._holders.values() if request.was_fetched]
        return sorted(fetched, key=lambda request: (request.tier, request.order))

    def _drop(self, request: Request) -> None:
        self._kv.free(request)
        del self._holders[request.request_id]

    def check_integrity(self, members: Iterable[Request]) -> None:
        """AssertionError unless the books agree with the waiting requests."""
        members = list(members)
        for request in members:
            assert bool(request.block_ids) == (request.request_id in self._holders), (
                f"request {request.request_id} waits with blocks that cannot be taken back"
            )
        assert set(self._holders) <= {request.request_id for request in members}
        assert set(self._swapped) == {
            request.request_id
            for request in members
            if request.num_swapped_tokens and not request.was_fetched and not request.block_ids
        }
