"""Requests that wait: the policy's queue, what it adds up to, and why it does not move.

This module does not know which policy orders it or what runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final

from paceline.core.memory.kv_cache import KVCacheManager, blocks_for
from paceline.core.queues.request_queue import WaitingQueue
from paceline.core.queues.wait_clocks import WaitClocks
from paceline.core.request import Request, RequestStatus
from paceline.core.tier import Tier

__all__ = ["WaitingRoom"]


_ORDER = attrgetter("order")
# requests looked ahead at, those that come next
_LOOK_AHEAD: Final = 16


def _is_targeted(request: Request) -> bool:
    # all of it stays as it is while a request waits
    return (
        request.targets.ttft is not None
        and not request.best_effort
        and request.first_scheduled_time is None
    )


def _first_token_due(request: Request) -> float:
    return request.asked.arrival_time + (request.targets.ttft or 0.0)


def _promise(request: Request, band: Tier) -> tuple[float, int, Request] | None:
    # unlike any other: requests themselves are never compared
    deadline = request.targets.deadline
    if deadline is None or band is not Tier.PROMISED:
        return None
    return request.asked.arrival_time + deadline, request.order[1], request


class WaitingRoom:
    """All requests that could run next, best effort apart from the others. Those that wait for an
    event are elsewhere (``forks``).

    Args:
        make_queue: the policy's; called once for each band. Nobody else may change the queues.
        later: the policy's.
        group: whose requests are kept in one row, in order; of one group if nobody minds.
    """

    def __init__(
        self,
        make_queue: Callable[[], WaitingQueue],
        kv: KVCacheManager,
        later: Callable[[float], float],
        group: Callable[[Request], str] = lambda _: "",
    ) -> None:
        # by band
        self._queues = tuple(make_queue() for _ in Tier)
        self._later = later
        self.group = group
        # best-effort requests with a deadline would miss it if order alone decided between them and
        # those that have missed already; set by ``deadlines``
        self.pressing = False
        self.clocks = WaitClocks()
        # came since the last plan was made
        self._newcomers: list[Request] = []
        self._kv = kv
        # members that hold blocks: forks, and those whose swapped blocks were fetched ahead
        self._holders: dict[str, Request] = {}
        # members with blocks in host memory that may be fetched ahead, once: not to and fro
        self._swapped: dict[str, Request] = {}
        # members with a TTFT target that may still be met, by group, in order; nobody has none
        self._targeted: dict[str, list[Request]] = {}
        # when their first tokens are due, sorted
        self._dues: list[float] = []
        # arrivals and departures of these
        self.num_changes = 0
        # members of the band PROMISED with a deadline, the earliest first: (deadline, order of
        # arrival, request)
        self.promised: list[tuple[float, int, Request]] = []
        self._num_tokens = [0] * len(Tier)
        # of favoured ones, by band: how many, and their prompt tokens
        self._num_favoured = [0] * len(Tier)
        self._favoured_tokens = [0] * len(Tier)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return chain(*self._queues)

    def __contains__(self, request: Request) -> bool:
        return request in self._queues[request.tier]

    @property
    def ordinary(self) -> WaitingQueue:
        """The queue of those that are not best effort, to look at."""
        return self._queues[0]

    def arrive(self, request: Request) -> None:
        """A request begins to wait between two plans: until the next one for that alone."""
        self.enter(request, request.asked.arrival_time)
        self._newcomers.append(request)

    def enter(self, request: Request, now: float) -> None:
        """A request begins to wait while a plan is made."""
        request.history.waiting_since = now
        request.history.waits_before = self.clocks.reading()
        self.push(request)

    def begin_plan(self, now: float) -> None:
        """Add up what those who wait have waited for until now."""
        self.clocks.run(now)
        if self._newcomers:
            reading = self.clocks.reading()
            for request in self._newcomers:
                request.history.waits_before = reading
            self._newcomers.clear()

    def rest(self) -> None:
        """Nobody waits, and it may be long until a plan is made."""
        self.clocks.stop()
        self._newcomers.clear()

    def leave(self, request: Request, now: float) -> None:
        """A popped request was admitted: add up what it waited for."""
        waited = max(0.0, now - request.history.waiting_since)
        spent = self.clocks.since(request.history.waits_before, waited)
        if request.history.waits:
            spent = [old + new for old, new in zip(request.history.waits, spent, strict=True)]
        request.history.waits = spent

    def push(self, request: Request) -> None:
        """Put a request at its place; one that was taken goes on waiting."""
        band = request.tier
        self._size += 1
        self._num_tokens[band] += request.num_new_tokens
        if request.favoured:
            self._num_favoured[band] += 1
            self._favoured_tokens[band] += request.num_new_tokens
        if request.block_ids:
            self._holders[request.request_id] = request
        elif request.num_swapped_tokens and not request.was_fetched:
            self._swapped[request.request_id] = request
        if _is_targeted(request):
            self.num_changes += 1
            insort(self._targeted.setdefault(self.group(request), []), request, key=_ORDER)
            insort(self._dues, _first_token_due(request))
        if (promise := _promise(request, band)) is not None:
            insort(self.promised, promise)
        self._queues[band].push(request)

    def peek(self, *, best_effort: bool) -> Request | None:
        """The first of its kind. Of best-effort requests, those that nobody waits for come last;
        among the others order decides, but while deadlines press, those that have missed what they
        were promised count as best effort once more."""
        ordinary, promised, relegated, background = self._queues
        if not best_effort:
            return ordinary.peek()
        first, second = promised.peek(), relegated.peek()
        if first is None or second is None:
            return first or second or background.peek()
        key, number = second.order
        if self.pressing:
            key = self._later(key)
        return second if (key, number) < first.order else first

    def first(self) -> Request | None:
        """The first of all: best effort only if nobody else waits."""
        return self._queues[0].peek() or self.peek(best_effort=True)

    def first_best_effort(self) -> Request | None:
        """Of best effort, whoever comes first by order alone."""
        heads = [queue.peek() for queue in self._queues[1:]]
        return min((head for head in heads if head is not None), key=_ORDER, default=None)

    def any_before(self, band: Tier) -> bool:
        """Whether somebody waits in an earlier band."""
        return any(map(len, self._queues[:band]))

    def take(self, head: Request) -> None:
        """Take out what ``peek`` or ``first`` has just shown."""
        taken = self._queues[head.tier].pop()
        assert taken is head, "somebody else came first"
        self._uncount(head)

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it stands. It may come back in another band."""
        self._queues[request.tier].remove(request)
        self._uncount(request)

    def _uncount(self, request: Request) -> None:
        band = request.tier
        self._size -= 1
        self._num_tokens[band] -= request.num_new_tokens
        if request.favoured:
            self._num_favoured[band] -= 1
            self._favoured_tokens[band] -= request.num_new_tokens
        self._holders.pop(request.request_id, None)
        self._swapped.pop(request.request_id, None)
        if _is_targeted(request):
            self.num_changes += 1
            group = self.group(request)
            own = self._targeted[group]
            del own[bisect_left(own, request.order, key=_ORDER)]
            if not own:
                del self._targeted[group]
            del self._dues[bisect_left(self._dues, _first_token_due(request))]
        if (promise := _promise(request, band)) is not None:
            del self.promised[bisect_left(self.promised, promise)]

    @property
    def targeted(self) -> Mapping[str, Sequence[Request]]:
        """Members whose first token is due at some time and has not come, by group, in order."""
        return self._targeted

    @property
    def earliest_due(self) -> float:
        """When the first of these first tokens is due; never, if there are none."""
        return self._dues[0] if self._dues else math.inf

    @property
    def num_ordinary_tokens(self) -> int:
        """``num_new_tokens`` of those that are not best effort."""
        return self._num_tokens[Tier.ORDINARY]

    def ahead_of(self, request: Request) -> tuple[int, int]:
        """(requests, new prompt tokens) taken to be served before a newcomer: all of them, less
        best effort unless it is that itself. Before a favoured one only those that are favoured
        too: the others wait for it."""
        band = request.tier
        bands = Tier.BACKGROUND if Tier.ORDINARY < band < Tier.BACKGROUND else band + 1
        if request.favoured:
            return sum(self._num_favoured[:bands]), sum(self._favoured_tokens[:bands])
        return sum(map(len, self._queues[:bands])), sum(self._num_tokens[:bands])

    @property
    def num_new_tokens(self) -> int:
        """Of all members: prompt tokens that were not in the prefix cache when they came."""
        return sum(self._num_tokens)

    def num_lacking(self, request: Request) -> int:
        """Tokens of a member that would have to be computed if it were let in now; of one that
        runs, those that it lacks."""
        if request.status is RequestStatus.RUNNING:
            return request.num_uncomputed_tokens
        return self._kv.num_lacking(request)

    def upcoming(self, count: int) -> list[Request]:
        """Who is likely to be let in next, in order, at most so many."""
        ordinary, *others = self._queues
        found = ordinary.first(count)
        if len(found) < count and any(map(len, others)):
            *promised, background = (queue.first(count - len(found)) for queue in others)
            found += [*sorted(chain(*promised), key=_ORDER), *background][: count - len(found)]
        return found

    def prefetch(self, num_running: int, max_tokens: int) -> None:
        """Fetch the swapped blocks of those that come next, as far as there is room that neither
        whoever comes before them nor those running are about to need.

        Args:
            num_running: each is left a free block, so that none of these has to be taken back
                before it has computed as many tokens as that holds.
            max_tokens: no more are moved, unless the first has more.
        """
        if not self._swapped:
            return
        size = self._kv.block_size
        spared, moved = num_running, 0
        for request in self.upcoming(_LOOK_AHEAD):
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

    def make_room(self, *, beside_others: bool) -> None:
        """Take back what was fetched for those who come after the first, if that is what it lacks:
        it came, or came to the front, after they were fetched."""
        if not self._kv.num_fetched_blocks:
            return
        head = self.first()
        if head is None:
            return
        fetched = [r for r in self._fetched() if r is not head]
        shortfall = self._kv.shortfall(head, beside_others=beside_others)
        if shortfall > sum(request.num_fetched_blocks for request in fetched):
            return
        while shortfall > 0:
            self._drop(fetched.pop())
            shortfall = self._kv.shortfall(head, beside_others=beside_others)

    def drop_blocks(self) -> bool:
        """Take blocks back from whoever holds some; True if anybody did. Of those fetched ahead,
        the last in order alone; to be called again while that does not do."""
        fetched = self._fetched()
        if fetched:
            self._drop(fetched[-1])
            return True
        holders = list(self._holders.values())
        for request in holders:
            self._drop(request)
        return bool(holders)

    def _fetched(self) -> list[Request]:
        """Members whose blocks were fetched ahead, in order."""
        fetched = [r for r in self._holders.values() if r.was_fetched]
        return sorted(fetched, key=lambda r: (r.tier, r.order))

    def _drop(self, request: Request) -> None:
        self._kv.free(request)
        del self._holders[request.request_id]

    def check_integrity(self) -> None:
        """AssertionError unless counts and members agree."""
        members = list(self)
        assert len(members) == self._size
        for request in members:
            assert bool(request.block_ids) == (request.request_id in self._holders), (
                f"request {request.request_id} waits with blocks that nobody could take back"
            )
        assert set(self._holders) <= {request.request_id for request in members}
        assert set(self._swapped) == {
            request.request_id
            for request in members
            if request.num_swapped_tokens and not request.was_fetched and not request.block_ids
        }
        targeted = sorted(filter(_is_targeted, members), key=_ORDER)
        assert sorted(chain(*self._targeted.values()), key=_ORDER) == targeted
        assert self._dues == sorted(map(_first_token_due, targeted))
        for group, own in self._targeted.items():
            assert own and all(self.group(request) == group for request in own)
            assert own == sorted(own, key=_ORDER)
        promises = [_promise(request, request.tier) for request in members]
        assert sorted(filter(None, promises)) == self.promised
        for band, queue in enumerate(self._queues):
            assert all(request.tier == band for request in queue)
            assert sum(request.num_new_tokens for request in queue) == self._num_tokens[band]
            favoured = [request.num_new_tokens for request in queue if request.favoured]
            assert len(favoured) == self._num_favoured[band]
            assert sum(favoured) == self._favoured_tokens[band]
            queue.check_integrity()
