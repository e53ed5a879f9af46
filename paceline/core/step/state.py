"""State that the parts of one scheduler share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.interface import KVCache
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.memory.outlook import MemoryOutlook
from paceline.core.memory.pressure import PressureValve
from paceline.core.policies import FcfsPolicy, PolicyContext, make_policy
from paceline.core.predict.chunk import ChunkSize
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.queues.running import RunningList
from paceline.core.queues.wait_clocks import REASONS, Reason
from paceline.core.queues.waiting import Forks, WaitingQueues
from paceline.core.request import Forecast, Request, RequestStatus
from paceline.core.stats import SchedulerStats
from paceline.core.step.in_flight import StepsInFlight
from paceline.core.tier import Tier

__all__ = ["LastPlan", "SchedulerState", "Totals", "check_integrity", "take_stats"]


@dataclass(slots=True)
class LastPlan:
    """Findings of the last plan, for forecasts between plans."""

    # prompt tokens that the step had room for
    chunk_tokens: int
    # why the head of the queue was blocked; None: it was not
    blocked_by: Reason | None = None
    # counts plans, results and ends of requests: findings under another number are out of date
    version: int = 0
    # a forecast, the seconds that it really took, and whether the request had been
    # demoted, of all that had their first token since forecasts were last made
    first_tokens: list[tuple[Forecast, float, bool]] = field(default_factory=list)
    # requests that were demoted since ``RequestAdmission`` read this
    demoted: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """Counters from the start on, over all requests."""

    num_recomputed_tokens: int = 0
    num_demoted: int = 0
    # requests that have had their first tokens, and tokens of their prompts
    num_first_tokens: int = 0
    num_prompt_tokens: int = 0
    # tokens that were computed for requests that were aborted or failed
    num_discarded_tokens: int = 0
    # refused requests by QueueFullError.reason
    refused: Counter[str] = field(default_factory=Counter)
    # rows with drafts; draft tokens and right ones by source, and right ones by index in the row
    num_drafts: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    accepted_by_place: Counter[int] = field(default_factory=Counter)

    def note_draft(self, source: str, num_tokens: int, num_right: int) -> None:
        """Count a row of ``num_tokens`` draft tokens, the first ``num_right`` of them right."""
        self.num_drafts += 1
        self.drafted[source] += num_tokens
        self.accepted[source] += num_right
        for place in range(num_tokens):
            self.accepted_by_place[place] += place < num_right


class SchedulerState:
    """The parts, made at rest and owned by the scheduler; they change, the references do not."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        policy: FcfsPolicy | None = None,
        kv: KVCache | None = None,
    ) -> None:
        self.config, self.cache = config, cache
        # seconds of a step and lengths of outputs, learned online, and the work that follows
        self.step_time, self.lengths = StepTimeModel(), LengthHistory()
        self.work = WorkEstimator(self.step_time, self.lengths)
        self.policy = policy = policy or make_policy(PolicyContext(config, self.work))
        tokens, gap = config.max_num_batched_tokens, math.inf
        if policy.bounds_gaps and config.max_token_gap_s is not None:
            gap = config.max_token_gap_s
        adaptive = config.adaptive_token_budget
        self.chunk = ChunkSize(self.step_time, tokens, adaptive=adaptive, gap=gap)
        self.kv: KVCache = kv or KVCacheManager(cache)
        self.valve = PressureValve(config.pressure_threshold)
        newest_first = config.queue_timeout_s is not None and policy.serves_newest_late_first
        self.waiting = WaitingQueues(policy.make_queue, self.kv, newest_first=newest_first)
        self.forks = Forks()
        self.running = RunningList(config, cache, self.kv, self.waiting, self.work)
        self.steps = StepsInFlight(self.step_time, config.schedule_ahead_s)
        self.last, self.totals = LastPlan(tokens), Totals()

    def outlook(self, tier: Tier, running: Sequence[Request], num_freed: int = 0) -> MemoryOutlook:
        """Return the memory forecast for a request of ``tier``, with ``num_freed`` more blocks
        free. Best effort is preempted for ordinary requests, so these need not count it."""
        if tier is Tier.ORDINARY:
            running = [request for request in running if request.tier is tier]
        num_held = self.cache.num_blocks - self.kv.pool.num_free - num_freed
        return MemoryOutlook(running, self.work, self.cache, num_held)


def take_stats(state: SchedulerState) -> SchedulerStats:
    """Return a snapshot of the parts."""
    totals, host = state.totals, state.kv.host
    kv, waiting, steps, blocked_by = state.kv, state.waiting, state.steps, state.last.blocked_by
    return SchedulerStats(
        num_running=len(state.running.requests), num_waiting=len(waiting) + len(state.forks),
        num_waiting_capacity=len(waiting), num_waiting_deferred=len(state.forks),
        num_blocks=kv.pool.num_blocks, num_free_blocks=kv.pool.num_free,
        num_preemptions=state.running.num_preemptions, num_drafts=totals.num_drafts,
        num_draft_tokens=totals.drafted.total(), num_accepted_tokens=totals.accepted.total(),
        drafted=tuple(totals.drafted.items()), accepted=tuple(totals.accepted.items()),
        accepted_by_place=tuple((str(i), n) for i, n in totals.accepted_by_place.items()),
        prefix_cache_queries=kv.num_queried_tokens, prefix_cache_hits=kv.num_hit_tokens,
        num_recomputed_tokens=totals.num_recomputed_tokens, num_demoted=totals.num_demoted,
        num_swapped_out_blocks=host.num_swapped_out, num_swapped_in_blocks=host.num_swapped_in,
        num_discarded_tokens=totals.num_discarded_tokens, refused=tuple(totals.refused.items()),
        # all but waits for adapters, which end before a request is queued
        waited=tuple(zip(REASONS, waiting.clocks.reading(), strict=True))[: Reason.ADAPTER],
        pressure_level=state.valve.level,
        predicted_step_seconds=steps.predicted_seconds, actual_step_seconds=steps.actual_seconds,
        num_prefill_tokens=steps.num_prefill_tokens, num_decode_tokens=steps.num_decode_tokens,
        num_prompt_tokens=totals.num_prompt_tokens, num_cached_free_blocks=kv.pool.num_cached_free,
        num_window_blocks=state.cache.num_window_blocks,
        num_free_window_blocks=0 if kv.windows is None else kv.windows.num_free,
        num_host_blocks=state.cache.num_host_blocks, num_free_host_blocks=host.num_free,
        blocked_by=None if blocked_by is None else REASONS[blocked_by],
    )  # fmt: skip


def check_integrity(state: SchedulerState, live: Mapping[str, Request]) -> None:
    """Raise AssertionError unless all invariants of ``live`` requests, queues and memory hold."""
    forks, running = list(state.forks), state.running.requests
    waiting = [*state.waiting, *forks]
    known = [*running, *waiting]
    assert len(known) == len(live), "a request is lost or in two places"
    assert {id(r) for r in known} == {id(r) for r in live.values()}
    assert len(running) <= state.config.max_num_seqs, "too many requests run"
    for request in running:
        assert request.status is RequestStatus.RUNNING
        most = request.num_tokens + request.num_pending_tokens + request.num_draft_tokens
        assert request.num_computed_tokens <= most
    for request in waiting:
        assert request.status is RequestStatus.WAITING
        assert not request.block_ids or request.asked.fork_of, "a waiting request holds blocks"
    for request in known:
        flying = state.steps.num_rows(request)
        assert 0 <= request.num_pending_tokens <= flying, "a pending token of no step"
        assert request.num_tokens + request.num_pending_tokens <= request.max_total_tokens
        assert not request.num_draft_tokens or flying, "draft tokens of no step"
    for fork in forks:
        assert fork.asked.fork_of in live, "a fork waits for no request"
    state.running.check_integrity()
    state.waiting.check_integrity()
    state.kv.check_integrity(known)
