"""Requests that wait: the policy's queue, what it adds up to, and why it does not move.

This module does not know which policy orders it or what runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from paceline.core.kv_cache import KVCacheManager
from paceline.core.queues import WaitingQueue
from paceline.core.request import Request
from paceline.core.waits import WaitClocks

__all__ = ["WaitingRoom"]


_ORDER = attrgetter("order")


def _is_targeted(request: Request) -> bool:
    # all of it stays as it is while a request waits
    return (
        request.slo.ttft is not None
        and not request.slo.best_effort
        and request.first_scheduled_time is None
    )


def _band(request: Request) -> int:
    """0: ordinary; 1: best effort; 2: best effort that nobody waits for."""
    slo = request.slo
    return slo.best_effort + slo.background


class WaitingRoom:
    """All requests that could run next, best effort apart from the others. Those that wait for an
    event are elsewhere (``forks``).

    Args:
        make_queue: the policy's; called twice. Nobody else may change the queues.
    """

    def __init__(self, make_queue: Callable[[], WaitingQueue], kv: KVCacheManager) -> None:
        # see ``_band``
        self._queues = (make_queue(), make_queue(), make_queue())
        self.clocks = WaitClocks()
        self._kv = kv
        # members that hold blocks: forks, and those whose swapped blocks were fetched ahead
        self._holders: dict[str, Request] = {}
        # members with a TTFT target that may still be met, by tenant, in order; nobody has none
        self._targeted: dict[str, list[Request]] = {}
        # arrivals and departures of these
        self.num_changes = 0
        self._num_tokens = [0, 0, 0]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return chain(*self._queues)

    def __contains__(self, request: Request) -> bool:
        return request in self._queues[_band(request)]

    @property
    def ordinary(self) -> WaitingQueue:
        """The queue of those that are not best effort, to look at."""
        return self._queues[0]

    def enter(self, request: Request, now: float) -> None:
        """A request begins to wait."""
        request.waiting_since = now
        request.waits_before = self.clocks.reading()
        self.push(request)

    def leave(self, request: Request, now: float) -> None:
        """A popped request was admitted: add up what it waited for."""
        waited = max(0.0, now - request.waiting_since)
        spent = self.clocks.since(request.waits_before, waited)
        if request.waits:
            spent = [old + new for old, new in zip(request.waits, spent, strict=True)]
        request.waits = spent

    def push(self, request: Request) -> None:
        """Put a request at its place; one that was taken goes on waiting."""
        band = _band(request)
        self._size += 1
        self._num_tokens[band] += request.num_prompt_tokens
        if request.block_ids:
            self._holders[request.request_id] = request
        if _is_targeted(request):
            self.num_changes += 1
            insort(self._targeted.setdefault(request.tenant, []), request, key=_ORDER)
        self._queues[band].push(request)

    def peek(self, *, best_effort: bool) -> Request | None:
        """The first of its kind; of best-effort requests, those that nobody waits for come last."""
        if not best_effort:
            return self._queues[0].peek()
        return self._queues[1].peek() or self._queues[2].peek()

    def first(self) -> Request | None:
        """The first of all: best effort only if nobody else waits."""
        return self._queues[0].peek() or self.peek(best_effort=True)

    def take(self, head: Request) -> None:
        """Take out what ``peek`` or ``first`` has just shown."""
        taken = self._queues[_band(head)].pop()
        assert taken is head, "somebody else came first"
        self._uncount(head)

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it stands. It may come back as best effort."""
        self._queues[_band(request)].remove(request)
        self._uncount(request)

    def _uncount(self, request: Request) -> None:
        self._size -= 1
        self._num_tokens[_band(request)] -= request.num_prompt_tokens
        self._holders.pop(request.request_id, None)
        if _is_targeted(request):
            self.num_changes += 1
            own = self._targeted[request.tenant]
            del own[bisect_left(own, request.order, key=_ORDER)]
            if not own:
                del self._targeted[request.tenant]

    @property
    def targeted(self) -> Mapping[str, Sequence[Request]]:
        """Members whose first token is due at some time and has not come, by tenant, in order."""
        return self._targeted

    def ahead_of(self, request: Request) -> tuple[int, int]:
        """(requests, prompt tokens) taken to be served before a newcomer: all of them, less best
        effort unless it is that itself."""
        bands = _band(request) + 1
        return sum(map(len, self._queues[:bands])), sum(self._num_tokens[:bands])

    def prefetch(self) -> None:
        """Fetch the swapped blocks of the first, if it has any and there is room."""
        head = self.first()
        if head is not None and not head.num_pending_tokens and self._kv.prefetch(head):
            self._holders[head.request_id] = head

    def drop_blocks(self) -> bool:
        """Take blocks back from all who hold some; True if anybody did."""
        holders = list(self._holders.values())
        for request in holders:
            self._kv.free(request)
        self._holders.clear()
        return bool(holders)

    def check_integrity(self) -> None:
        """AssertionError unless counts and members agree."""
        members = list(self)
        assert len(members) == self._size
        for request in members:
            assert bool(request.block_ids) == (request.request_id in self._holders), (
                f"request {request.request_id} waits with blocks that nobody could take back"
            )
        assert set(self._holders) <= {request.request_id for request in members}
        targeted = sorted(filter(_is_targeted, members), key=_ORDER)
        assert sorted(chain(*self._targeted.values()), key=_ORDER) == targeted
        for tenant, own in self._targeted.items():
            assert own and all(request.tenant == tenant for request in own)
            assert own == sorted(own, key=_ORDER)
        for band, queue in enumerate(self._queues):
            assert all(_band(request) == band for request in queue)
            assert sum(request.num_prompt_tokens for request in queue) == self._num_tokens[band]
            queue.check_integrity()
