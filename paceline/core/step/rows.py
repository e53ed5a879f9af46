"""Rows for those that run: a token each, and what is left for whoever is further behind.

This module does not know who is let in, or in which order groups of requests are served.
"""

from __future__ import annotations

import math

from paceline.core.config import CacheConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.memory.preemption import Preemption
from paceline.core.outputs import ScheduledRow
from paceline.core.policies import SchedulingPolicy
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.queues.forks import Forks
from paceline.core.queues.running import Running
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.request import Request
from paceline.core.step.builder import Draft
from paceline.core.tier import Tier

__all__ = ["Rows"]

# see draft.py
_new = tuple.__new__


class Rows:
    """Writes rows into drafts. Owned by the planner, with whom it shares what it is given."""

    def __init__(
        self,
        cache: CacheConfig,
        *,
        kv: KVCacheManager,
        policy: SchedulingPolicy,
        waiting: WaitingRoom,
        running: Running,
        forks: Forks,
        step_time: StepTimeModel,
        preemption: Preemption,
    ) -> None:
        self._cache = cache
        self._kv = kv
        self._policy = policy
        self._waiting = waiting
        self._running = running
        self._forks = forks
        self._step_time = step_time
        self._preemption = preemption

    def extend(
        self,
        draft: Draft,
        running: list[Request],
        others: int,
        now: float,
        *,
        limited: bool = False,
    ) -> bool:
        """Rows for ``running``, in order, leaving a token for each of ``others``. Whoever has to
        give way is taken out of the list. Returns whether anybody had to.

        ``running`` are all of best effort or none of them is; ``limited``: they get rows as far as
        these do not make the step too long for others.
        """
        preempted = False
        block_size = self._cache.block_size
        rows, requests = draft.rows, draft.requests
        pool = self._kv.pool
        plain = self._policy.mixes and not self._forks
        # some have to pay for their rows
        plain = plain and not (limited and draft.background_seconds < math.inf)
        # whether there is room for a row has to be found out one by one
        asked = limited and draft.seconds < math.inf
        caching = self._cache.enable_prefix_caching
        # such plain rows that the draft does not count yet, and the keys before them
        handed_out = handed_keys = 0
        index = 0
        while index < len(running):
            request = running[index]
            computed = request.num_computed_tokens
            pending = request.num_pending_tokens
            total = request.num_tokens + pending
            held = len(request.block_ids) * block_size
            if (
                plain
                and total - computed == 1
                and total < request.max_total_tokens
                and not request.shares_tail
                and (computed < held or pool.num_free)
            ):
                # what most rows of most steps are, by the shortest way: the rest of this loop would
                # do the same
                if asked:
                    draft.count_plain(handed_out, handed_keys)
                    handed_out = handed_keys = 0
                    if not draft.spares(request, self._step_time):
                        index += 1
                        continue
                block_ids: tuple[int, ...] = ()
                if computed == held:
                    block_ids = tuple(pool.allocate(1))
                    request.block_ids += block_ids
                rows.append(_new(ScheduledRow, (request.request_id, computed, 1, block_ids, True)))
                requests.append(request)
                handed_out += 1
                handed_keys += computed
                request.num_computed_tokens = total
                request.num_pending_tokens = pending + 1
                if caching and total // block_size > request.num_hashed_blocks:
                    self._kv.cache_computed(request)
                index += 1
                continue
            draft.count_plain(handed_out, handed_keys)
            handed_out = handed_keys = 0
            if (
                # nothing left to compute, or only to wait for the last token
                total == computed
                or total >= request.max_total_tokens
                or not self._takes(draft, request, total - computed, limited)
            ):
                index += 1
                continue
            num_tokens = total - computed
            if num_tokens > 1:
                reserved = len(running) - index - 1 + others
                num_tokens = max(1, min(num_tokens, draft.budget - reserved))
                if limited:
                    num_tokens = min(num_tokens, draft.fitting(request, self._step_time))
            new_block_ids: tuple[int, ...] = ()
            if request.shares_tail or computed + num_tokens > held:
                extension = self._kv.extend(request, num_tokens)
                while extension is None:
                    preempted = True
                    if not self._waiting.drop_blocks():
                        victim = self._victim(draft, running, index, limited)
                        self._running.preempt(victim, now)
                        if victim in running:
                            running.remove(victim)
                        if victim is request:
                            break
                    extension = self._kv.extend(request, num_tokens)
                if extension is None:
                    continue
                new_block_ids = extension.new_block_ids
                if extension.copy is not None:
                    draft.copies.append(extension.copy)
            self.add(draft, request, num_tokens, new_block_ids)
            index += 1
        draft.count_plain(handed_out, handed_keys)
        return preempted

    def _takes(self, draft: Draft, request: Request, wanted: int, limited: bool) -> bool:
        """Whether a running request gets a row: always, but for a policy that does not mix and
        for those that would make the step too long for the others."""
        if not self._policy.mixes:
            return draft.narrow if wanted == 1 else draft.wide
        return not limited or draft.spares(request, self._step_time)

    def _victim(self, draft: Draft, running: list[Request], index: int, limited: bool) -> Request:
        """Who gives blocks up for ``running[index]``: nobody who has a row already, and of
        ``running`` nobody who comes before it."""
        candidates = running[index:]
        band = running[index].tier
        if band is not Tier.BACKGROUND:
            taken = {request.request_id for request in [*draft.requests, *running]}
            rest = [r for r in self._running.requests if r.request_id not in taken]
            if band is Tier.ORDINARY or limited:
                candidates += [r for r in rest if r.tier > band]
            else:
                # in a hurry: nearly all others of best effort have more time
                candidates = [r for r in rest if r.best_effort] or candidates
        return self._preemption.victim(candidates, self._policy.expendable)

    def add(
        self, draft: Draft, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]
    ) -> None:
        """A row of the next ``num_tokens`` tokens, whose blocks it has."""
        pays = draft.background_seconds < math.inf and request.tier is Tier.BACKGROUND
        before = self._step_time.predict(draft.shape) if pays else 0.0
        draft.add(request, num_tokens, new_block_ids)
        if pays:
            draft.background_cost += self._step_time.predict(draft.shape) - before
        end = request.num_computed_tokens
        if end // self._cache.block_size > request.num_hashed_blocks:
            self._kv.cache_computed(request)
        if self._forks and end >= request.num_prompt_tokens:
            for child in self._forks.take(request):
                self._kv.fork(request, child)
                draft.forked.append(child)
