"""Memory of layers with a sliding window: window blocks, held while a window reaches them.

With such layers, a block has two parts. Its id is the index of one part, for all other layers. The
other part, of layers with a window, is in a *window block*, of which there are fewer. Here
``window`` is 6, ``block_size`` 4, and the next row begins at position 17::

    block_ids         [  7         3         9         2         5  ]   held until the request ends
    window blocks        -         1         6         0         4
                                   |         `------- held --------'
                                   idle: others with this prefix find it, until it is taken

There are enough for all running requests in any state, so no request waits for one. A cached prefix
is usable if the blocks in its last window still have their window blocks. A fork that waits holds
none, and starts as a request of its own if one is gone when its turn comes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.block_pool import BlockPool
from paceline.core.outputs import BlockCopy, WindowBlock
from paceline.core.request import MOST_DRAFT_TOKENS, Request, RequestStatus

__all__ = ["WindowBlocks", "window_blocks_needed"]


def _most_held(window: int, block_size: int) -> int:
    """Return the most that a request holds between plans: drafts included, and the next block."""
    return -(-(window + MOST_DRAFT_TOKENS) // block_size) + 2


def window_blocks_needed(config: SchedulerConfig, window: int, block_size: int) -> int:
    """Return the number with which running requests never lack one: enough for all their windows
    and a step's tokens. The number of blocks is always enough, too."""
    most = min(_most_held(window, block_size), -(-config.max_model_len // block_size))
    return config.max_num_seqs * most + -(-config.max_num_batched_tokens // block_size)


class WindowBlocks:
    """Window blocks, and how many requests hold each. Driven by ``KVCacheManager`` alone."""

    def __init__(self, config: CacheConfig, pool: BlockPool) -> None:
        self._pool, self._window, self._block_size = pool, config.window, config.block_size
        self._count = config.num_window_blocks
        self._max_idle = self._count if config.max_idle_blocks is None else config.max_idle_blocks
        # the window block of each block, until another block takes it, and how many hold it
        self._places: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        # blocks whose window block no request holds, least recently dropped first
        self._idle: OrderedDict[int, None] = OrderedDict()
        # window blocks given out for the next plan, in order, and requests with rows in it
        self._given: list[WindowBlock] = []
        self._moved: list[Request] = []

    @property
    def num_free(self) -> int:
        """Window blocks that no request holds."""
        return self._count - len(self._holders)

    def usable(self, found: Sequence[int]) -> int:
        """Return how many of these blocks, a cached prefix, a request can start with."""
        index = end = len(found)
        while index > self._first(end * self._block_size):
            index -= 1
            if found[index] not in self._places:
                end = index
        return end

    def can_start(self, fork: Request) -> bool:
        """Whether the window blocks that the fork reads first are still there."""
        return self._places.keys() >= set(fork.block_ids[self._first(fork.num_computed_tokens) :])

    def start(self, request: Request) -> None:
        """Hold the window blocks that a request, admitted with its blocks, reads first."""
        first = self._first(request.num_computed_tokens)
        request.window_indices = range(first, len(request.block_ids))
        for block_id in request.block_ids[first:]:
            self._idle.pop(block_id, None)
            self._holders[block_id] = self._holders.get(block_id, 0) + 1

    def has_room(self, request: Request, num_tokens: int, copies: bool) -> bool:
        """Whether ``extend`` to ``num_tokens`` is possible, with a copy of a block or without."""
        wanted = -(-num_tokens // self._block_size) - request.window_indices.stop
        return max(0, wanted) + copies <= self.num_free

    def extend(self, request: Request, num_tokens: int, copy: BlockCopy | None) -> None:
        """Assign window blocks for the positions up to ``num_tokens``, after a copy of a block."""
        if copy is not None:
            self._give(copy.dst, self._places[copy.src])
            self._drop([copy.src])
        held = request.window_indices
        stop = max(held.stop, -(-num_tokens // self._block_size))
        for block_id in request.block_ids[held.stop : stop]:
            self._give(block_id, -1)
        request.window_indices = range(held.start, stop)
        self._moved.append(request)

    def end_plan(self) -> tuple[WindowBlock, ...]:
        """Return the window blocks given out for a plan, and drop those that no later row reads:
        the request that takes one next writes to it in a later step."""
        for request in self._moved:
            held = request.window_indices
            # draft tokens may be wrong, and their positions are computed again
            first = self._first(request.num_computed_tokens - request.num_draft_tokens)
            request.window_indices = range(max(held.start, first), held.stop)
            self._drop(request.block_ids[held.start : request.window_indices.start])
        given, self._moved, self._given = tuple(self._given), [], []
        return given

    def free(self, request: Request) -> None:
        """Drop all window blocks of a request."""
        held, request.window_indices = request.window_indices, range(0)
        # the last first, as the pool frees them
        self._drop(request.block_ids[held.start : held.stop][::-1])

    def prefer(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Forget equal blocks that have lost their window blocks, so that the pool finds these."""
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            known = self._pool.lookup(block_hash)
            if known is not None and known not in self._places and block_id in self._places:
                self._pool.forget(known)

    def _first(self, position: int) -> int:
        """Return the index of the first block that a row from this position on reads."""
        return max(0, position - self._window + 1) // self._block_size

    def _give(self, block_id: int, source: int) -> None:
        place = len(self._places)
        if block_id in self._places:
            # its window block of an earlier use
            del self._idle[block_id]
            place = self._places[block_id]
        elif place == self._count or len(self._idle) > self._max_idle:
            place = self._places.pop(self._idle.popitem(last=False)[0])
        self._places[block_id], self._holders[block_id] = place, 1
        self._given.append(WindowBlock(block_id, place, source))

    def _drop(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._holders[block_id] -= 1
            if not self._holders[block_id]:
                del self._holders[block_id]
                self._idle[block_id] = None

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless requests hold what their rows will read, and few more."""
        holders: Counter[int] = Counter()
        for request in requests:
            held, where = request.window_indices, f"request {request.request_id}"
            holders.update(request.block_ids[held.start : held.stop])
            assert len(held) <= _most_held(self._window, self._block_size), f"{where} holds {held}"
            if request.status is not RequestStatus.RUNNING:
                assert not held, f"{where} waits and holds window blocks {held}"
                continue
            first = self._first(request.num_computed_tokens - request.num_draft_tokens)
            end = held.stop * self._block_size
            covers = held.start <= first and request.num_computed_tokens <= end
            assert covers, f"{where} reads from block {first} on and holds {held}"
        assert holders == self._holders, "window blocks are held by requests that do not read them"
        assert self._idle.keys() == self._places.keys() - self._holders.keys(), "idle ones are lost"
        places = sorted(self._places.values())
        assert places == list(range(len(places))), "a window block is lost, or in two places"
        assert len(places) <= self._count
