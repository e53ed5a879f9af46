"""Forecast of memory: does it last until the running requests have ended?

This module does not decide; ``step.batch_admission`` does.
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

# quantile of predicted lengths, above the median to be on the safe side
_LENGTH_QUANTILE = 0.7
# share of the cache that is never promised to requests
_RESERVE = 0.03
_MAX_TOTAL_TOKENS = attrgetter("max_total_tokens")
# the second of (minus tokens still to grow, tokens now)
_NOW = itemgetter(1)


def capacity(cache: CacheConfig) -> int:
    """Return the tokens of the cache that may be promised to requests."""
    return int((1.0 - _RESERVE) * cache.num_blocks) * cache.block_size


def future_peak(longest_first: Sequence[tuple[int, int]]) -> int:
    """Return the most tokens held at once if every sequence grows by one token a step to its end.

    Memory peaks just before one of them ends; with the longest-lived first, the first i + 1 are
    alive when number i ends (LightLLM's Past-Future scheduler, ASPLOS'25, arXiv 2507.10150). Each
    is (minus tokens still to come, tokens held now); they are sorted.
    """
    if not longest_first:
        return 0
    # a loop over i, held += now[i], max(to_come[i] * (i + 1) + held), at the speed of C
    minus_to_come, now = zip(*longest_first, strict=True)
    growth = map(mul, minus_to_come, count(1))
    peak: int = max(map(sub, accumulate(now), growth))
    return peak


class MemoryOutlook:
    """Forecast whether memory lasts until the running requests and one more end. Valid for a step.

    Of the ``num_held`` blocks in use, those that several requests hold count once; a request's last
    block counts as full.
    """

    def __init__(
        self, running: Sequence[Request], work: WorkEstimator, cache: CacheConfig, num_held: int
    ) -> None:
        self._running = list(running)
        self._work = work
        self._block_size = cache.block_size
        self._held = num_held * cache.block_size
        self._capacity = capacity(cache)
        # tokens of the running requests if every output reached its maximum
        self._worst = sum(map(_MAX_TOTAL_TOKENS, running)) + len(running) * cache.block_size
        # (minus tokens still to grow, tokens now) of each, sorted; None until needed
        self._sequences: list[tuple[int, int]] | None = None
        # present tokens of all running requests, as if no block were shared
        self._wanted = 0
        # upper bound of the peak of these sequences
        self._peak = math.inf

    def hold(self, num_held: int) -> None:
        """Set the number of blocks in use; no request was added meanwhile."""
        self._held = num_held * self._block_size

    def admits(self, request: Request, num_shared_blocks: int) -> bool:
        """Whether the cache will not overflow with a request that shares so many blocks in use."""
        if self._worst + request.max_total_tokens + self._block_size <= self._capacity:
            return True
        if self._sequences is None:
            self._sequences = sorted(self._outlooks(self._running))
            self._wanted = sum(map(_NOW, self._sequences))
        sequence = minus_to_come, now = self._newcomer(request, num_shared_blocks)
        most = self._capacity + max(0, self._wanted - self._held)
        # the request adds at most all the tokens that it will have itself
        if self._peak + now - minus_to_come <= most:
            return True
        index = bisect_left(self._sequences, sequence)
        self._sequences.insert(index, sequence)
        peak = future_peak(self._sequences)
        del self._sequences[index]
        self._peak = min(self._peak, peak)
        return peak <= most

    def add(self, request: Request, num_shared_blocks: int) -> None:
        """Count the request, which was admitted."""
        self._worst += request.max_total_tokens + self._block_size
        if self._sequences is None:
            self._running.append(request)
            # blocks shared with running requests are not held twice
            self._held += (len(request.block_ids) - num_shared_blocks) * self._block_size
        else:
            minus_to_come, now = self._newcomer(request, num_shared_blocks)
            insort(self._sequences, (minus_to_come, now))
            self._peak += now - minus_to_come

    def _newcomer(self, request: Request, num_shared_blocks: int) -> tuple[int, int]:
        ((minus_to_come, now),) = self._outlooks((request,))
        return minus_to_come, now - num_shared_blocks * self._block_size

    def _outlooks(self, requests: Iterable[Request]) -> list[tuple[int, int]]:
        """Return (minus tokens still to grow, least tokens of the blocks needed now) of each."""
        size, found = self._block_size, []
        # one call for each of hundreds of requests would take a tenth of the planning time
        for request in requests:
            num_tokens = request.num_tokens
            num_output = num_tokens - request.num_prompt_tokens
            if request.predicted_output <= num_output:
                request.predicted_output = self._work.expected_tokens(request, _LENGTH_QUANTILE)
            now = num_tokens + size - 1
            found.append((num_output - request.predicted_output, now - now % size))
        return found
