"""Looking ahead: will memory last until the running requests have ended?

This module does not decide; ``step.admission`` does.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from operator import attrgetter, itemgetter, mul, sub

from paceline.core.config import CacheConfig
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.request import Request

__all__ = ["MemoryOutlook", "capacity", "future_peak"]

# quantile of predicted lengths: on the safe side of the middle
_LENGTH_QUANTILE = 0.7
# share of the cache that is never promised to requests
_RESERVE = 0.03
_MAX_TOTAL_TOKENS = attrgetter("max_total_tokens")
# the second of (minus tokens still to grow, tokens now)
_NOW = itemgetter(1)


def capacity(cache: CacheConfig) -> int:
    """Tokens of the cache that may be promised to requests."""
    return int((1.0 - _RESERVE) * cache.num_blocks) * cache.block_size


def future_peak(longest_first: Sequence[tuple[int, int]]) -> int:
    """Most tokens held at once if every sequence grows by one token a step until it ends.

    Memory peaks just before one of them ends; with the longest-lived first, the first i + 1 are
    alive when number i ends (LightLLM's Past-Future scheduler, ASPLOS'25, arXiv 2507.10150).

    Args:
        longest_first: (minus tokens still to come, tokens held now) of each, sorted.
    """
    if not longest_first:
        return 0
    # as a loop over i, held += now[i], max(to_come[i] * (i + 1) + held), at the speed of C
    minus_to_come, now = zip(*longest_first, strict=True)
    growth = map(mul, minus_to_come, count(1))
    peak: int = max(map(sub, accumulate(now), growth))
    return peak


class MemoryOutlook:
    """Whether memory lasts until running requests, and one more, have ended. Good for one step.

    Blocks that several requests hold are counted once; a request's last block as if it were full.

    Args:
        running: requests that run; the list may change, but not before the outlook is dropped.
        num_held_blocks: blocks in use.
    """

    def __init__(
        self,
        running: Sequence[Request],
        work: WorkEstimator,
        cache: CacheConfig,
        num_held_blocks: int,
    ) -> None:
        self._running = list(running)
        self._work = work
        self._block_size = cache.block_size
        self._held = num_held_blocks * cache.block_size
        self._capacity = capacity(cache)
        # their tokens if every output became as long as it may
        self._worst = sum(map(_MAX_TOTAL_TOKENS, running)) + len(running) * cache.block_size
        # (minus tokens still to grow, tokens now) of each, sorted; None until it is needed
        self._sequences: list[tuple[int, int]] | None = None
        # tokens now of all running requests, as if no block were shared
        self._wanted = 0
        # at least the peak of these sequences
        self._peak = math.inf

    def hold(self, num_held_blocks: int) -> None:
        """So many blocks are in use by now; no request was added meanwhile."""
        self._held = num_held_blocks * self._block_size

    def admits(self, request: Request, num_shared_blocks: int) -> bool:
        """Whether the cache will not overflow with ``request``, of whose blocks so many are in use
        already."""
        if self._worst + request.max_total_tokens + self._block_size <= self._capacity:
            return True
        if self._sequences is None:
            self._sequences = sorted(self._outlooks(self._running))
            self._wanted = sum(map(_NOW, self._sequences))
        sequence = minus_to_come, now = self._newcomer(request, num_shared_blocks)
        most = self._capacity + max(0, self._wanted - self._held)
        # the request adds no more than all that it will have itself
        if self._peak + now - minus_to_come <= most:
            return True
        index = bisect_left(self._sequences, sequence)
        self._sequences.insert(index, sequence)
        peak = future_peak(self._sequences)
        del self._sequences[index]
        self._peak = min(self._peak, peak)
        return peak <= most

    def add(self, request: Request, num_shared_blocks: int) -> None:
        """The request was admitted."""
        self._worst += request.max_total_tokens + self._block_size
        if self._sequences is None:
            self._running.append(request)
            # blocks that it shares with running requests are not held twice
            self._held += (len(request.block_ids) - num_shared_blocks) * self._block_size
        else:
            minus_to_come, now = self._newcomer(request, num_shared_blocks)
            insort(self._sequences, (minus_to_come, now))
            self._peak += now - minus_to_come

    def _newcomer(self, request: Request, num_shared_blocks: int) -> tuple[int, int]:
        ((minus_to_come, now),) = self._outlooks((request,))
        return minus_to_come, now - num_shared_blocks * self._block_size

    def _outlooks(self, requests: Iterable[Request]) -> list[tuple[int, int]]:
        """(minus tokens still to grow, tokens whose place it takes now, at least) of each."""
        size, found = self._block_size, []
        # a call for each of hundreds of them would be a tenth of what a step's plan may cost
        for request in requests:
            num_tokens = request.num_tokens
            num_output = num_tokens - request.num_prompt_tokens
            if request.predicted_output <= num_output:
                request.predicted_output = self._work.expected_tokens(request, _LENGTH_QUANTILE)
            now = num_tokens + size - 1
            found.append((num_output - request.predicted_output, now - now % size))
        return found
