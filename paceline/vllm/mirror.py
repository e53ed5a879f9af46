"""vLLM's KV cache, as the core's planning sees it: counts of vLLM's blocks.

vLLM's cache is the only one. A request's block table here has the right length and no ids; free
blocks are vLLM's, less what plans have promised to prompts of which only a part is computed;
cached prefixes are looked up in vLLM's cache. So nothing is copied, and nothing can disagree for
longer than one step: what came out otherwise is amended.

This module does not import vLLM, and does not decide anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from paceline.core.config import CacheConfig
from paceline.core.memory.host_blocks import HostBlocks
from paceline.core.memory.interface import Extension
from paceline.core.memory.kv_cache import blocks_for
from paceline.core.request import Request

__all__ = ["MirroredBlocks", "MirroredCache"]

_UNCHANGED: Final = Extension((), None)


class MirroredBlocks:
    """The ``Pool``: a number of free blocks, set before each plan."""

    # vLLM keeps the order of eviction to itself
    num_cached_free = 0

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_free = num_blocks

    def allocate(self, count: int, /) -> list[int]:
        self.num_free -= count
        return [0] * count


class MirroredCache:
    """The ``KVCache`` over vLLM's ``KVCacheManager``. ``find`` returns vLLM's own request, and
    ``num_theirs`` is the number of free blocks of vLLM's empty cache."""

    # such layers are groups of vLLM's cache
    windows = None

    def __init__(
        self, config: CacheConfig, theirs: Any, find: Callable[[str], Any], num_theirs: int
    ) -> None:
        self.block_size = config.block_size
        self.pool = MirroredBlocks(config.num_blocks)
        # no blocks: preempted requests are computed again
        self.host = HostBlocks(config, self.pool)
        self.num_queried_tokens = self.num_hit_tokens = 0
        self._theirs, self._find = theirs, find
        self._num_theirs = num_theirs
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        # (tokens, blocks) of cached prefixes that were looked up since vLLM's cache last changed
        self._found: dict[str, tuple[int, Sequence[Any]]] = {}

    def begin_plan(self, running: Iterable[Request]) -> None:
        """Take over vLLM's free blocks. Called before each plan, when vLLM has carried out all
        earlier ones."""
        self._found.clear()
        size = self.block_size
        promised = sum(len(r.block_ids) - -(-r.num_computed_tokens // size) for r in running)
        free = self._theirs.block_pool.get_num_free_blocks()
        free = free * self.pool.num_blocks // self._num_theirs
        self.pool.num_free = max(0, free - promised)

    def assume_found(self, request: Request, num_tokens: int) -> None:
        """Take a request that vLLM does not have to find a cached prefix."""
        self._found[request.request_id] = num_tokens, ()

    def forget_lookups(self) -> None:
        """Forget looked-up prefixes: vLLM's cache has changed."""
        self._found.clear()

    # ------------------------------------------------------------------ what vLLM's cache holds

    def _lookup(self, request: Request) -> tuple[int, Sequence[Any]]:
        """Return the tokens and blocks of a waiting request's longest cached prefix."""
        name = request.request_id
        found = self._found.get(name)
        if found is None:
            # newer versions return more than these two
            blocks, num_tokens, *_ = self._theirs.get_computed_blocks(self._find(name))
            found = self._found[name] = num_tokens, blocks.blocks[0]
        return found

    def _held(self, request: Request) -> Sequence[Any]:
        """Return the blocks that a request has in vLLM."""
        blocks: Sequence[Any] = self._theirs.get_blocks(request.request_id).blocks[0]
        return blocks

    def num_found(self, request: Request) -> int:
        return self._lookup(request)[0]

    def num_lacking(self, request: Request) -> int:
        return request.num_tokens - self.num_found(request)

    def num_missing(self, request: Request) -> int:
        stored = min(request.num_tokens + request.num_pending_tokens, request.max_total_tokens - 1)
        return max(0, blocks_for(stored, self.block_size) - len(request.block_ids))

    def num_in_use(self, request: Request, without: Iterable[Request] = ()) -> int:
        gone = Counter(block.block_id for other in without for block in self._held(other))
        return sum(b.ref_cnt > gone[b.block_id] for b in self._lookup(request)[1])

    def num_freed(self, head: Request, losers: Sequence[Request]) -> Iterator[int]:
        wanted = {block.block_id for block in self._lookup(head)[1]}
        holders: Counter[int] = Counter()
        freed = 0
        yield freed
        for loser in losers:
            held = self._held(loser)
            holders.update(block.block_id for block in held)
            freed += sum(
                b.ref_cnt == holders[b.block_id] and b.block_id not in wanted for b in held
            )
            # blocks that were promised to it and that vLLM has not given it yet
            freed += max(0, len(loser.block_ids) - len(held))
            yield freed

    def shortfall(self, request: Request, *, beside_others: bool) -> int:
        reserve = self._watermark_blocks if beside_others else 0
        return max(0, self._needed(request) + reserve - self.pool.num_free)

    def _needed(self, request: Request) -> int:
        """Return the free blocks that a waiting request takes: cached ones without users too."""
        _, blocks = self._lookup(request)
        idle: int = sum(block.ref_cnt == 0 for block in blocks)
        return blocks_for(request.num_tokens, self.block_size) - len(blocks) + idle

    # ------------------------------------------------------------------ what a plan takes of it

    def admit(self, request: Request, *, beside_others: bool) -> bool:
        if self.shortfall(request, beside_others=beside_others) > 0:
            return False
        num_found, _ = self._lookup(request)
        self.pool.num_free -= self._needed(request)
        request.block_ids = [0] * blocks_for(request.num_tokens, self.block_size)
        request.num_computed_tokens = num_found
        if request.num_preemptions == 0:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_found
            request.num_cached_tokens = num_found
        return True

    def extend(self, request: Request, num_tokens: int) -> Extension | None:
        end = request.num_computed_tokens + num_tokens
        missing = blocks_for(end, self.block_size) - len(request.block_ids)
        if missing <= 0:
            return _UNCHANGED
        if missing > self.pool.num_free:
            return None
        request.block_ids += self.pool.allocate(missing)
        return _UNCHANGED

    def free(self, request: Request, *, forget: bool = False) -> None:
        held = self._held(request)
        # blocks that others use stay in use; those only promised are given back as well
        freed = sum(block.ref_cnt == 1 for block in held)
        self.pool.num_free += freed + max(0, len(request.block_ids) - len(held))
        request.block_ids = []
        request.num_computed_tokens = 0

    def cache_computed(self, request: Request) -> None:
        """Do nothing: vLLM offers full blocks to its cache itself."""

    def fork(self, parent: Request, child: Request) -> None:
        raise AssertionError("vLLM's front end sends each choice as a request of its own")

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless each table is long enough for the computed tokens."""
        for request in requests:
            held, computed = len(request.block_ids), request.num_computed_tokens
            found = f"{computed} computed tokens in {held} blocks of {self.block_size}"
            assert blocks_for(computed, self.block_size) <= held, f"{request.request_id}: {found}"
