"""Rows for running requests: a token each, and the rest for requests that are further behind.

This module does not know which requests are admitted, or in which order tiers are served.
"""

from __future__ import annotations

import math

from paceline.core.memory.interface import Extension
from paceline.core.outputs import ScheduledRow
from paceline.core.request import Request
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Rows"]

# see limits.py
_new = tuple.__new__


class Rows:
    """Writes rows into steps."""

    def __init__(self, state: SchedulerState) -> None:
        self._kv, self._running = state.kv, state.running
        self._forks, self._waiting = state.forks, state.waiting
        self._mixes, self._expendable = state.policy.mixes, state.policy.expendable
        self._block_size = state.cache.block_size
        self._caches = state.cache.enable_prefix_caching

    def extend(self, step: Step, running: list[Request], later: int, *, limited: bool) -> bool:
        """Add rows for ``running``, all or none ordinary, in order, leaving a token for each of
        ``later`` others. Requests that are preempted are taken out of the list. Returns whether any
        was. ``limited``: rows are within the step's limits for best effort."""
        preempted = False
        asks = limited and step.seconds < math.inf
        meters = limited and step.background_seconds < math.inf
        plain = self._mixes and not (meters or self._forks.by_parent or self._kv.windows)
        index = 0
        while index < len(running):
            if plain:
                index = self._plain_rows(step, running, index, asks=asks)
                if index == len(running):
                    break
            request = running[index]
            num_tokens = self._num_tokens(step, running, index, later, limited)
            if not num_tokens:
                index += 1
                continue
            extension = self._kv.extend(request, num_tokens)
            if extension is None:
                preempted = True
                extension = self._make_room(step, running, index, num_tokens, limited)
                if extension is None:
                    # the request itself was preempted
                    continue
            self.add(step, request, num_tokens, extension)
            index += 1
        return preempted

    def _num_tokens(
        self, step: Step, running: list[Request], index: int, later: int, limited: bool
    ) -> int:
        """Return the tokens of the row of ``running[index]``; 0: it gets none. See ``extend``."""
        request = running[index]
        behind = request.num_uncomputed_tokens
        if behind <= 0 or request.num_computed_tokens + behind >= request.max_total_tokens:
            # all is computed, or the request waits for its last token or for the result of drafts
            return 0
        if self._mixes:
            takes = (step.wide or behind == 1) and (not limited or step.takes(request))
        else:
            takes = step.wide == (behind > 1)
        if not takes or behind == 1:
            return int(takes)
        reserved = len(running) - index - 1 + later
        num_tokens = max(1, min(behind, step.budget - reserved))
        return min(num_tokens, step.chunk(request, admission=False)) if limited else num_tokens

    def _plain_rows(self, step: Step, running: list[Request], index: int, *, asks: bool) -> int:
        """Add rows of one token for the requests from ``index`` on, by the shortest way, up to the
        first that needs more; ``extend`` would do the same for each. Returns the index where it
        stopped. ``asks``: ask the step before each row; else every request gets one."""
        rows, requests = step.rows, step.requests
        pool, block_size, caches = self._kv.pool, self._block_size, self._caches
        first, num_keys, skipped = index, 0, 0
        for request in running[index:] if index else running:
            computed = request.num_computed_tokens
            pending = request.num_pending_tokens
            total = request.num_tokens + pending
            held = len(request.block_ids) * block_size
            if (
                total - computed != 1
                or total >= request.max_total_tokens
                or request.shares_tail
                or (computed >= held and not pool.num_free)
            ):
                break
            index += 1
            if asks:
                step.count_plain(index - 1 - first - skipped, num_keys)
                first, num_keys, skipped = index - 1, 0, 0
                if not step.takes(request):
                    skipped = 1
                    continue
            block_ids: tuple[int, ...] = ()
            if computed == held:
                block_ids = tuple(pool.allocate(1))
                request.block_ids += block_ids
            rows.append(_new(ScheduledRow, (request.request_id, computed, 1, block_ids, True)))
            requests.append(request)
            num_keys += computed
            request.num_computed_tokens = total
            request.num_pending_tokens = pending + 1
            if caches and total // block_size > request.num_hashed_blocks:
                self._kv.cache_computed(request)
        step.count_plain(index - first - skipped, num_keys)
        return index

    def _make_room(
        self, step: Step, running: list[Request], index: int, num_tokens: int, limited: bool
    ) -> Extension | None:
        """Free blocks for ``num_tokens`` tokens of ``running[index]`` from waiting requests, else
        from running ones; None: the request itself had to give up its own."""
        request = running[index]
        while (extension := self._kv.extend(request, num_tokens)) is None:
            if self._waiting.drop_blocks():
                continue
            victim = self._victim(step, running, index, limited)
            self._running.preempt(victim, step.now)
            if victim in running:
                running.remove(victim)
            if victim is request:
                return None
        return extension

    def _victim(self, step: Step, running: list[Request], index: int, limited: bool) -> Request:
        """Choose the request that gives up blocks for ``running[index]``: none that has a row
        already, and none of ``running`` before it."""
        candidates = running[index:]
        tier = running[index].tier
        if tier is not Tier.BACKGROUND:
            taken = {request.request_id for request in [*step.requests, *running]}
            rest = [r for r in self._running.requests if r.request_id not in taken]
            if tier is Tier.ORDINARY or limited:
                candidates += [r for r in rest if r.tier > tier]
            else:
                # it must run: nearly all other best-effort requests have more time
                candidates = [r for r in rest if r.best_effort] or candidates
        return self._running.victim(candidates, self._expendable)

    def add(self, step: Step, request: Request, num_tokens: int, extension: Extension) -> None:
        """Add a row of the next ``num_tokens`` tokens, for which a request has the blocks."""
        if extension.copy is not None:
            step.copies.append(extension.copy)
        step.add(request, num_tokens, extension.new_block_ids)
        end = request.num_computed_tokens
        if end // self._block_size > request.num_hashed_blocks:
            self._kv.cache_computed(request)
        if self._forks.by_parent and end >= request.num_prompt_tokens:
            for child in self._forks.take(request):
                self._kv.fork(request, child)
                step.forked.append(child)
