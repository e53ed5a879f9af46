"""Waiting requests: a queue of the policy's per tier, sums, and wait clocks; forks apart from them.

Late requests that were never started have a queue of their own if no wait is longer than
``queue_timeout_s``. While the backlog cannot be worked off, the newest of them is served first: its
caller waits for a moment, while the oldest would be served when nearly all its time is over, as
would each one after it (adaptive LIFO).

This module does not know which policy orders the queues or what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import add

from paceline.core.memory.interface import KVCache
from paceline.core.queues.request_queue import RequestQueue, WaitingQueue
from paceline.core.queues.wait_clocks import Reason, WaitClocks
from paceline.core.request import ORDER, Request
from paceline.core.tier import Tier

__all__ = ["Forks", "WaitingQueues"]


def _newest(request: Request) -> tuple[float, int]:
    return -request.asked.arrival_time, -request.order[1]


class Forks:
    """The other choices of ``n > 1`` by their parent's id, until its prompt is computed: then they
    share its blocks. If the parent ends before that, they become requests of their own."""

    def __init__(self) -> None:
        # public, because it is empty in most steps and a plain step should not pay for a call
        self.by_parent: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.by_parent.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.by_parent.values())

    def add(self, parent: Request, child: Request) -> None:
        self.by_parent.setdefault(parent.request_id, []).append(child)

    def take(self, parent: Request) -> list[Request]:
        """Take out all forks that wait for ``parent``."""
        return self.by_parent.pop(parent.request_id, [])

    def remove(self, child: Request) -> None:
        """Take a fork out that ended while it waited."""
        assert child.asked.fork_of is not None
        siblings = self.by_parent[child.asked.fork_of]
        siblings.remove(child)
        if not siblings:
            del self.by_parent[child.asked.fork_of]


class WaitingQueues:
    """All requests that could be admitted next. Only this class changes the policy's queues.
    ``newest_first``: late requests that were never started are served newest first."""

    def __init__(
        self, make_queue: Callable[[], WaitingQueue], kv: KVCache, *, newest_first: bool
    ) -> None:
        # a queue for each tier, and one for late requests; empty unless these go newest first
        self._queues = tuple(make_queue() for _ in Tier)
        self.late = RequestQueue(_newest)
        self._newest_first = newest_first
        # public, for reading alone
        self.ordinary = self._queues[Tier.ORDINARY]
        self.demoted = self._queues[Tier.DEMOTED]
        self._kv = kv
        # members that hold blocks: forks
        self._holders: dict[str, Request] = {}
        self.clocks = WaitClocks()
        # members that arrived since the last plan was made
        self._newcomers: list[Request] = []
        # called for each member with a TTFT target or a deadline that comes (1) or goes (-1)
        self.on_change: Callable[[Request, int], None] | None = None
        # prompt tokens by tier that were not in the prefix cache when their request arrived
        self.num_tokens = [0] * len(Tier)
        # boosted members by tier, and their tokens of the same kind
        self._num_boosted = [0] * len(Tier)
        self._boosted_tokens = [0] * len(Tier)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return chain(*self._queues, self.late)

    def __contains__(self, request: Request) -> bool:
        return request in self._queue_of(request)

    def _queue_of(self, request: Request) -> WaitingQueue:
        apart = request.tier is Tier.DEMOTED and self._newest_first
        if apart and request.first_scheduled_time is None and not request.asked.slo.best_effort:
            return self.late
        return self._queues[request.tier]

    def arrive(self, request: Request) -> None:
        """Add a request between two plans; until the next plan it waits for that alone."""
        waited = request.asked.adapter_wait
        if waited:
            request.history.waits = [waited * (reason is Reason.ADAPTER) for reason in Reason]
        self.enter(request, request.asked.arrival_time + waited)
        self._newcomers.append(request)

    def enter(self, request: Request, now: float) -> None:
        """Add a request while a plan is made."""
        request.history.waiting_since = now
        request.history.waits_before = self.clocks.reading()
        self.push(request)

    def begin_plan(self, now: float) -> None:
        """Add up the waiting time of members until now."""
        self.clocks.run(now)
        if self._newcomers:
            reading = self.clocks.reading()
            for request in self._newcomers:
                request.history.waits_before = reading
            self._newcomers.clear()

    def rest(self) -> None:
        """Stop the clocks: no request is left, and it may be long until the next plan."""
        self.clocks.stop()
        self._newcomers.clear()

    def leave(self, request: Request, now: float) -> None:
        """Add up the waiting time of a member that was taken and is now admitted."""
        history = request.history
        waited = max(0.0, now - history.waiting_since)
        spent = self.clocks.since(history.waits_before, waited)
        history.waits = list(map(add, history.waits, spent)) if history.waits else spent

    def push(self, request: Request) -> None:
        """Sort a request in. The wait of a member that was taken goes on."""
        if request.block_ids:
            self._holders[request.request_id] = request
        self._count(request, 1)
        self._queue_of(request).push(request)

    def take(self, head: Request) -> None:
        """Take out the first of its tier."""
        queue = self.ordinary if head.tier is Tier.ORDINARY else self._queue_of(head)
        taken = queue.pop()
        assert taken is head, "another request came first"
        self._count(head, -1)

    def remove(self, request: Request) -> None:
        """Take a member out from any position."""
        self._queue_of(request).remove(request)
        self._count(request, -1)

    def drop_blocks(self) -> bool:
        """Take the blocks of all members that hold some; return True if there were any."""
        holders, self._holders = self._holders, {}
        for request in holders.values():
            self._kv.free(request)
        return bool(holders)

    def move(self, request: Request, change: Callable[[Request], None]) -> None:
        """Change a member's tier or order, and sort it in again."""
        self.remove(request)
        try:
            change(request)
        finally:
            self.push(request)

    def _count(self, request: Request, more: int) -> None:
        """Update all sums for a member that comes (1) or goes (-1)."""
        tier, tokens = request.tier, more * request.num_new_tokens
        self._size += more
        self.num_tokens[tier] += tokens
        if request.boosted:
            self._num_boosted[tier] += more
            self._boosted_tokens[tier] += tokens
        if more < 0:
            self._holders.pop(request.request_id, None)
        targets = request.targets
        if self.on_change is not None and (targets.ttft or targets.deadline):
            self.on_change(request, more)

    def peek_best_effort(self, *, pressing: bool) -> Request | None:
        """Return the first best-effort request. Those without targets come last; among the others
        order decides, but while deadlines press, requests that have missed theirs come later."""
        _, deadline_batch, demoted, background = self._queues
        first = deadline_batch.peek()
        if first is not None and pressing:
            return first
        heads = filter(None, (first, demoted.peek(), self.late.peek()))
        return min(heads, key=ORDER, default=None) or background.peek()

    def first(self, *, pressing: bool) -> Request | None:
        """Return the first of all: best effort only if no other request waits."""
        return self._queues[0].peek() or self.peek_best_effort(pressing=pressing)

    def best_effort_heads(self) -> Iterator[Request]:
        """Yield the first request of each best-effort tier."""
        return filter(None, (queue.peek() for queue in (*self._queues[1:], self.late)))

    def ahead_of(self, request: Request, tier: Tier) -> tuple[int, int]:
        """Return (requests, new prompt tokens) expected to be served before a newcomer to a tier:
        all of earlier tiers, and those that come first in its own; for a boosted one only boosted
        ones. Best effort with targets is served as one tier, in order."""
        one = Tier.ORDINARY < tier < Tier.BACKGROUND
        first, last = (Tier.DEADLINE_BATCH, Tier.DEMOTED) if one else (tier, tier)
        if request.boosted:
            return sum(self._num_boosted[: last + 1]), sum(self._boosted_tokens[: last + 1])
        requests = tokens = 0
        for each in range(last + 1):
            queues = (self._queues[each], self.late)[: 1 + (each == Tier.DEMOTED)]
            num = ahead = sum(map(len, queues))
            if num and each >= first:
                ahead = min(num, sum(queue.num_ahead(request) for queue in queues))
            requests += ahead
            tokens += self.num_tokens[each] * ahead // max(1, num)
        return requests, tokens

    def check_integrity(self) -> None:
        """Raise AssertionError unless sums and members agree."""
        members = list(self)
        assert len(members) == self._size
        holders = {request.request_id: request for request in members if request.block_ids}
        assert self._holders == holders, "a request waits with blocks that cannot be taken back"
        for queue in (*self._queues, self.late):
            assert all(self._queue_of(request) is queue for request in queue)
            queue.check_integrity()
        for tier in Tier:
            own = [request for request in members if request.tier is tier]
            assert sum(request.num_new_tokens for request in own) == self.num_tokens[tier]
            boosted = [request.num_new_tokens for request in own if request.boosted]
            assert len(boosted) == self._num_boosted[tier]
            assert sum(boosted) == self._boosted_tokens[tier]
