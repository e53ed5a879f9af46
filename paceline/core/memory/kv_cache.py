"""Block tables of requests: prefix caching, copy-on-write, and "does it fit".

Memory of one request, ``block_size`` = 4::

    tokens      p p p p | p p p p | p p o o | o .
    block_ids   [  7        3         9        2  ]      position p is in block_ids[p // 4]
                 `--------------'                        full blocks, hashed: others may share them
                                   `-----------'         written by this request alone

A block that another request references is never written. The tail that forks of a prompt
(``n > 1``) share is copied by the first to write it (copy-on-write).

This module does not know queues, budgets or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from struct import Struct

from paceline.core.config import CacheConfig
from paceline.core.memory.block_pool import BlockPool
from paceline.core.memory.host_blocks import HostBlocks
from paceline.core.memory.interface import Extension
from paceline.core.memory.windows import WindowBlocks
from paceline.core.outputs import BlockCopy
from paceline.core.request import AdapterUse, Request

__all__ = ["KVCacheManager", "blocks_for", "hash_block", "hash_prefix"]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return SHA-256 of the parent's hash and the block's tokens: equal only for equal prefixes, or
    one caller would be served with another's cache."""
    return sha256(parent + _packer(len(token_ids))(*token_ids)).digest()


@lru_cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    # takes half the time of array("q", token_ids).tobytes() and of struct.pack, same result
    return Struct(f"{num_tokens}q").pack


def _tokens(request: Request, start: int, stop: int) -> list[int]:
    """Return the known tokens ``[start, stop)`` of prompt + output."""
    prompt, prompt_token_ids = request.num_prompt_tokens, request.asked.prompt_token_ids
    if stop <= prompt:
        return prompt_token_ids[start:stop]
    if start >= prompt:
        return request.output_token_ids[start - prompt : stop - prompt]
    return prompt_token_ids[start:] + request.output_token_ids[: stop - prompt]


def root_hash(cache_salt: str | None, adapter: AdapterUse | None = None) -> bytes:
    """Return the parent hash of a first block; sequences share blocks only under the same salt and
    adapter. A name is no part of it: an adapter that is loaded again may have other contents."""
    salt = b"" if cache_salt is None else b"\x01" + cache_salt.encode("utf-8", "surrogatepass")
    # keys have one length, so no salt looks like a key
    key = b"" if adapter is None else b"\x02" + adapter.key
    return sha256(b"paceline-prefix" + key + salt).digest()


def hash_prefix(
    token_ids: Sequence[int],
    block_size: int,
    cache_salt: str | None = None,
    adapter: AdapterUse | None = None,
) -> list[bytes]:
    """Return the hashes of the full blocks that a request of these tokens may find in a cache: its
    last token is always computed."""
    parent, hashes = root_hash(cache_salt, adapter), []
    for start in range(0, len(token_ids) - block_size, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


_UNCHANGED = Extension((), None)


class KVCacheManager:
    """Block tables of all requests over one pool: the ``KVCache`` of our own backends. Driven by
    the scheduler alone."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.max_idle_blocks)
        self.block_size = config.block_size
        # None: layers with a sliding window, if there are any, use the ordinary blocks
        self.windows = WindowBlocks(config, self.pool) if config.num_window_blocks else None
        self.host = HostBlocks(config, self.pool)
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        # tokens looked up in, and served from, the prefix cache since start
        self.num_queried_tokens = self.num_hit_tokens = 0

    def shortfall(
        self, request: Request, shared: list[int] | None = None, *, beside_others: bool
    ) -> int:
        """Return the number of blocks missing for ``admit`` to succeed, or 0. ``shared`` are its
        ``starting_blocks``; ``beside_others`` keeps the watermark free for running requests."""
        if shared is None:
            shared = self.starting_blocks(request)
        reserve = self._watermark_blocks if beside_others else 0
        needed = blocks_for(request.num_tokens, self.block_size) - len(shared)
        needed += request.shares_tail and self._tail_is_shared(request)
        if shared:
            # a cached block that no request uses counts as free until it is taken
            needed += self.pool.num_idle(shared)
        return max(0, needed + reserve - self.pool.num_free)

    def admit(self, request: Request, *, beside_others: bool) -> bool:
        """Give a waiting request blocks for all its known tokens, ``starting_blocks`` first, or
        change nothing. Returns whether it got them."""
        windows = self.windows
        if windows is not None and request.block_ids and not windows.can_start(request):
            self.free(request)
        shared = self.starting_blocks(request)
        if self.shortfall(request, shared, beside_others=beside_others) > 0:
            return False
        if not request.block_ids:
            if shared:
                self.pool.acquire(shared)
            request.block_ids = shared
            request.num_computed_tokens = len(shared) * self.block_size
            request.num_hashed_blocks = len(shared)
            if request.num_swapped_tokens:
                self.host.restore(request)
            if request.num_preemptions == 0 and self.config.enable_prefix_caching:
                self.num_queried_tokens += request.num_tokens
                self.num_hit_tokens += request.num_computed_tokens
                request.num_cached_tokens = request.num_computed_tokens
        if windows is not None:
            windows.start(request)
        needed = blocks_for(request.num_tokens, self.block_size) - len(request.block_ids)
        request.block_ids.extend(self.pool.allocate(max(0, needed)))
        return True

    def num_in_use(self, request: Request, without: Iterable[Request] = ()) -> int:
        """Return how many of a waiting request's starting blocks others than ``without`` use."""
        gone = Counter(chain.from_iterable(other.block_ids for other in without))
        return sum(self.pool.ref_count(b) > gone[b] for b in self.starting_blocks(request))

    def num_freed(self, head: Request, losers: Sequence[Request]) -> Iterator[int]:
        """Yield the blocks freed if the first 0, 1, 2, ... of ``losers`` go. A block is freed with
        the last of its holders, unless ``head`` is about to hold it."""
        wanted = set(self.starting_blocks(head))
        holders: Counter[int] = Counter()
        freed = 0
        yield freed
        for loser in losers:
            holders.update(loser.block_ids)
            freed += sum(
                self.pool.ref_count(block_id) == holders[block_id] and block_id not in wanted
                for block_id in loser.block_ids
            )
            yield freed

    def num_found(self, request: Request) -> int:
        """Return the tokens of a request without blocks that the prefix cache holds now. The prompt
        is hashed here, so that no step has to wait for that."""
        return len(self.starting_blocks(request)) * self.block_size

    def num_lacking(self, request: Request) -> int:
        """Return the known tokens of a waiting request that ``admit`` would leave to compute."""
        if request.block_ids:
            return request.num_tokens - request.num_computed_tokens
        return request.num_tokens - max(self.num_found(request), request.num_swapped_tokens)

    def num_missing(self, request: Request) -> int:
        """Return the blocks that a running request lacks for its tokens, known or pending."""
        # the last token is never input to a step
        stored = min(request.num_tokens + request.num_pending_tokens, request.max_total_tokens - 1)
        return max(0, blocks_for(stored, self.block_size) - len(request.block_ids))

    def extend(self, request: Request, num_tokens: int) -> Extension | None:
        """Make ``num_tokens`` positions from ``num_computed_tokens`` on writable, and return the
        change to the block table; None, with nothing changed, when blocks are lacking."""
        start, windows = request.num_computed_tokens, self.windows
        end = start + num_tokens
        missing = blocks_for(end, self.block_size) - len(request.block_ids)
        if missing <= 0 and not request.shares_tail and windows is None:
            return _UNCHANGED
        copies_tail = request.shares_tail and self._tail_is_shared(request)
        has_room = windows is None or windows.has_room(request, end, copies_tail)
        if not has_room or max(missing, 0) + copies_tail > self.pool.num_free:
            return None
        copy = None
        if copies_tail:
            index = start // self.block_size
            source = request.block_ids[index]
            (target,) = self.pool.allocate(1)
            self.pool.release([source])
            request.block_ids[index] = target
            copy = BlockCopy(request.request_id, index, source, target)
        request.shares_tail = False
        new_block_ids = self.pool.allocate(missing) if missing > 0 else []
        request.block_ids.extend(new_block_ids)
        if windows is not None:
            windows.extend(request, end, copy)
        return Extension(tuple(new_block_ids), copy)

    def land_prefix(self, request: Request) -> None:
        """Put the full blocks of a prompt that was computed elsewhere into the prefix cache, where
        the first plan finds them, unless other requests took these blocks before."""
        held = self.starting_blocks(request)
        self.land(request.block_hashes[: (request.num_tokens - 1) // self.block_size], len(held))

    def land(self, block_hashes: Sequence[bytes], first: int) -> list[int]:
        """Cache a prefix of which ``block_hashes[first:]`` was computed elsewhere, as far as memory
        is free, and return the blocks that are to be written for these before the next plan runs.
        None where the prefix before ``first`` is gone: its rest would not be found."""
        assert self.windows is None, "what layers with a window keep does not come along"
        held = [self.pool.lookup(block_hash) for block_hash in block_hashes[:first]]
        kept = [block_id for block_id in held if block_id is not None]
        if len(kept) < first:
            return []
        missing = block_hashes[first:]
        self.pool.acquire(kept)
        landed = self.pool.allocate(min(len(missing), self.pool.num_free))
        self.pool.register(landed, missing[: len(landed)])
        self.pool.release([*kept, *landed])
        return landed

    def fork(self, parent: Request, child: Request) -> None:
        """Let ``child`` share the blocks of a prompt that ``parent`` has computed; only the last
        token is computed again, for its logits."""
        prompt_blocks = blocks_for(parent.num_prompt_tokens, self.block_size)
        child.block_ids = parent.block_ids[:prompt_blocks]
        self.pool.acquire(child.block_ids)
        child.num_computed_tokens = parent.num_prompt_tokens - 1
        child.num_new_tokens = 1
        full = child.num_computed_tokens // self.block_size
        child.num_hashed_blocks = min(parent.num_hashed_blocks, full)
        child.block_hashes = parent.block_hashes[: child.num_hashed_blocks]
        child.shares_tail = parent.shares_tail = True

    def cache_computed(self, request: Request) -> None:
        """Offer the request's newly full blocks to the prefix cache as a step is planned: a later
        row may read what an earlier row of the same step writes."""
        if not self.config.enable_prefix_caching:
            return
        known = min(request.num_computed_tokens, request.num_tokens)
        first, full = request.num_hashed_blocks, known // self.block_size
        if full <= first:
            return
        self._extend_hashes(request, full)
        block_ids, block_hashes = request.block_ids[first:full], request.block_hashes[first:full]
        if self.windows is not None:
            self.windows.prefer(block_ids, block_hashes)
        self.pool.register(block_ids, block_hashes)
        request.num_hashed_blocks = full

    def free(self, request: Request, *, forget: bool = False) -> None:
        """Free all blocks; hashed ones stay findable until evicted, unless ``forget``."""
        self.pool.release(request.block_ids, forget=forget)
        if self.windows is not None:
            self.windows.free(request)
        request.block_ids = []
        request.num_computed_tokens = request.num_draft_tokens = request.num_hashed_blocks = 0
        request.shares_tail = False

    def starting_blocks(self, request: Request) -> list[int]:
        """Return the blocks a waiting request would start with: those it holds already (a fork),
        else its longest cached prefix, with at least one token left to compute (for its logits)."""
        if request.block_ids:
            return request.block_ids
        if not self.config.enable_prefix_caching:
            return []
        usable = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, usable)
        found = []
        for block_hash in request.block_hashes[:usable]:
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found if self.windows is None else found[: self.windows.usable(found)]

    def _extend_hashes(self, request: Request, count: int) -> None:
        hashes, asked = request.block_hashes, request.asked
        parent = hashes[-1] if hashes else root_hash(asked.cache_salt, asked.adapter)
        size = self.block_size
        for start in range(len(hashes) * size, count * size, size):
            parent = hash_block(parent, _tokens(request, start, start + size))
            hashes.append(parent)

    def _tail_is_shared(self, request: Request) -> bool:
        index = request.num_computed_tokens // self.block_size
        return index < len(request.block_ids) and self.pool.ref_count(request.block_ids[index]) > 1

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless tables, counters and the pool agree."""
        requests, references = list(requests), Counter[int]()
        for request in requests:
            held, computed = len(request.block_ids), request.num_computed_tokens
            where = f"request {request.request_id}"
            references.update(request.block_ids)
            assert len(set(request.block_ids)) == held, f"{where}: a block twice in its table"
            found = f"{computed} computed tokens in {held} blocks of {self.block_size}"
            assert blocks_for(computed, self.block_size) <= held, f"{where}: {found}"
            assert request.num_hashed_blocks <= min(held, len(request.block_hashes)), where
            if held and not request.shares_tail:
                tail = request.block_ids[computed // self.block_size :]
                assert all(self.pool.ref_count(b) == 1 for b in tail), f"{where}: shared tail"
        self.pool.check_integrity(references)
        if self.windows is not None:
            self.windows.check_integrity(requests)
        self.host.check_integrity(requests)
