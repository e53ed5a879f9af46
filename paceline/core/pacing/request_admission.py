"""Refusal of requests before they are queued, and dropping of requests before they are started.

``check_admissible`` refuses requests that can never be served. ``RequestAdmission`` refuses,
with an honest time to come back, requests that cannot be served soon: the queue is full, the
memory-pressure valve is wide open, or the first token is predicted to take longer than the server
allows. It drops requests that waited past their limit, and late ones that would now be refused.

This module does not know the order of the queue.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import blocks_for
from paceline.core.memory.pressure import Pressure
from paceline.core.pacing.first_token import FirstTokenForecast
from paceline.core.pacing.share import GuaranteedShare
from paceline.core.pacing.tenants import TenantShares
from paceline.core.pacing.waiting_targets import WaitingTargets
from paceline.core.policies.deadline import patience
from paceline.core.queues.fair_queue import adapter_of
from paceline.core.request import FinishReason, Request, RequestStatus
from paceline.core.slo import MAX_SECONDS, Slo
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Move
from paceline.errors import InvalidRequestError, NeverFitsError, QueueFullError

__all__ = ["Expired", "RequestAdmission", "check_admissible", "longest_wait"]

# advised wait, s, before anything was measured
_RETRY_SECONDS: Final = 1.0
# least advised wait, s, as a caller that comes back at once is refused again
_LEAST_RETRY: Final = 0.1
# longest advised wait, s, after a refusal for the predicted wait: that is predicted from the time
# left over now, and the overload may end sooner
_MOST_RETRY: Final = 300.0
# no request is refused for a predicted wait below this multiple of its TTFT target
_TARGETS_WAITED: Final = 4.0
# most waiting requests of one tenant, or before best effort, for every place left in the queue
_PER_PLACE: Final = 7
# number of limits on waiting up to which those of requests that no longer wait are kept
_FEW: Final = 64

# ends a request
Finish = Callable[[Request, FinishReason], None]


class Expired(NamedTuple):
    """A request that was dropped before it was started."""

    request_id: str
    error: QueueFullError
    # forks that waited for its prompt and were dropped with it
    fork_ids: tuple[str, ...] = ()


class RequestAdmission:
    """Accepts or refuses requests, and limits how long they wait. One per scheduler. ``tenants`` is
    None if they are not kept apart."""

    def __init__(
        self,
        state: SchedulerState,
        tenants: TenantShares | None,
        share: GuaranteedShare,
        targets: WaitingTargets,
    ) -> None:
        self._state, self._tenants = state, tenants
        self.forecast = FirstTokenForecast(state, share, targets)
        # latest time at which a refused caller was asked to come back; idle or not, they all do
        self._comes_back_at = 0.0
        # a heap of limits on waiting: (time, order of arrival, request)
        self._limits: list[tuple[float, int, Request]] = []
        # number of limits above which those of requests that no longer wait are dropped
        self._most = _FEW
        # earliest time at which a limit on waiting ends
        self.next_expiry = math.inf

    # ------------------------------------------------------------------ refused

    def check(self, request: Request, live: Mapping[str, Request]) -> None:
        """Return if the request may be queued; its targets, key and forecast are set by then.

        A request with more forks than the whole queue has places would never be served, so no
        request is refused for lack of places while none waits.

        Raises:
            NeverFitsError, InvalidRequestError: it can never be served, see ``check_admissible``.
            QueueFullError: it cannot be served soon.
        """
        check_admissible(request, live, self._state.config, self._state.cache)
        if (error := self.foresee(request, counts=True)) is not None:
            raise error
        if request.asked.fork_of is None and request.asked.resumed is None:
            self.forecast.on_arrival(request)

    def foresee(self, request: Request, *, counts: bool) -> QueueFullError | None:
        """Return why a request, which an empty engine could serve, is refused if it arrives now;
        None if it may be queued. Its forecast is set. ``counts``: a refused caller is told so."""
        comes_back_at = self._comes_back_at
        try:
            self._judge(request)
        except QueueFullError as error:
            if counts:
                self._state.totals.refused[error.reason] += 1
            else:
                self._comes_back_at = comes_back_at
            return error
        return None

    def _judge(self, request: Request) -> None:
        state, asked = self._state, request.asked
        # a request with its own target is demoted no sooner than it would without one
        least_ttft = (state.config.default_ttft_s or 0.0) * max(1.0, patience(request))
        request.set_targets(state.policy.assumed(request), least_ttft)
        tenants = self._tenants
        if tenants is not None and tenants.is_light(asked.tenant, adapter_of(request)):
            request.move(Move.BOOST)
        if asked.fork_of is not None or asked.resumed is not None:
            # the queue had places for all forks when their parent arrived, and callers were
            # promised the rest of answers that have begun
            request.key = state.policy.key(request)
            return
        num_waiting, limit = len(state.waiting) + len(state.forks), state.config.max_num_waiting
        if state.last.blocked_by is None:
            # arrivals since the last plan get free slots in the next one
            free = state.config.max_num_seqs - len(state.running.requests)
            num_waiting = max(0, num_waiting - free)
        left = math.inf
        if limit is not None and num_waiting:
            left = limit - num_waiting - asked.num_forks
        if left > 0:
            request.num_new_tokens = request.num_prompt_tokens - state.kv.num_found(request)
        request.key = state.policy.key(request)
        request.order = (request.key, 0)
        longest = self._longest_wait(request)
        predicted = self.forecast.note(request, longest)
        self._check_places(request, num_waiting, left)
        if predicted is not None and predicted > longest:
            why = f"the first token is predicted to take {predicted:.1f} s, the limit is "
            why += f"{longest:g} s"
            now = asked.arrival_time
            raise self._refusal("predicted-ttft", why, self._room_in(request, predicted, now))
        if state.valve.level >= Pressure.REFUSE and num_waiting:
            why = f"KV memory is nearly full and {num_waiting} requests wait for it"
            raise self._refusal("pressure", why, predicted)

    def _room_in(self, request: Request, predicted: float, now: float) -> float:
        """Return the seconds until a request that would wait too long can be accepted: after those
        refused before it, or all of them would come back at once and be refused again."""
        following = self._comes_back_at + self.forecast.seconds_each(request) - now
        wait = min(_MOST_RETRY, max(predicted - self._longest_wait(request), following))
        self._comes_back_at = max(self._comes_back_at, now + wait)
        return wait

    def _longest_wait(self, request: Request) -> float:
        longest = self._state.config.max_predicted_ttft_s
        return longest_wait(longest, request.asked.slo, request.slo.ttft)

    def _check_places(self, request: Request, num_waiting: int, left: float) -> None:
        """Return if the queue has places for a request and its forks.

        Best effort, whose wait has no limit, is accepted while fewer requests wait than
        ``_PER_PLACE`` times the places left, so that other requests find one. Where tenants are
        kept apart and there are several, the same holds for the requests of each; where there is
        one, for those for each of its adapters. This is the dynamic threshold of shared packet
        buffers (Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998); no waiting request is dropped for
        it, and it needs no number of tenants. ``left`` places are left in the queue after the
        request's forks have theirs.
        """
        asked, tenants, limit = request.asked, self._tenants, self._state.config.max_num_waiting
        num_forks, predicted = asked.num_forks, request.history.predicted_ttft
        wanted = f", and this one has n={num_forks + 1} choices" if num_forks else ""
        if left <= 0:
            why = f"{num_waiting} requests wait already, the limit is {limit}{wanted}"
            raise self._refusal("queue-full", why, predicted)
        if num_waiting + num_forks < _PER_PLACE * left:
            return
        if asked.slo.best_effort:
            why = f"{num_waiting} requests wait already, and the {left + num_forks} places left of "
            why += f"{limit} are for requests that are not best effort{wanted}"
            raise self._refusal("queue-share", why, predicted)
        if tenants is None:
            return
        adapter = None if tenants.has_others(asked.tenant) else adapter_of(request)
        if adapter is not None and not tenants.has_other_flows(asked.tenant, adapter):
            return
        running = (r for r in self._state.running.requests if r.asked.tenant == asked.tenant)
        own = tenants.unfinished(asked.tenant, adapter)
        own -= sum(adapter is None or adapter_of(r) == adapter for r in running)
        if own + num_forks >= _PER_PLACE * left:
            named = {None: "of this tenant", "": "without an adapter"}
            whose = named.get(adapter, "for this adapter")
            why = f"{own} requests {whose} wait already, and the {left + num_forks} places "
            why += f"left of {limit} are for others{wanted}"
            raise self._refusal("queue-share", why, predicted)

    def _refusal(self, reason: str, why: str, seconds: float | None) -> QueueFullError:
        # no advised wait is longer than the longest target that a caller may set
        most = _MOST_RETRY if reason == "predicted-ttft" else MAX_SECONDS
        wait = min(max(_RETRY_SECONDS if seconds is None else seconds, _LEAST_RETRY), most)
        return QueueFullError(f"not accepted: {why}; retry in {wait:.1f} s", wait, reason)

    # ------------------------------------------------------------------ dropped

    def watch(self, request: Request) -> None:
        """Limit how long a queued request, whose order is set, waits until it is started."""
        timeout = None if request.asked.slo.best_effort else self._state.config.queue_timeout_s
        limits = (request.asked.slo.queue_ttl, timeout)
        shortest = min((limit for limit in limits if limit is not None), default=None)
        if shortest is None:
            return
        at = request.asked.arrival_time + shortest
        heapq.heappush(self._limits, (at, request.order[1], request))
        if len(self._limits) > self._most:
            # otherwise requests that ended would keep their prompts in memory
            self._limits = [e for e in self._limits if e[2].status is RequestStatus.WAITING]
            heapq.heapify(self._limits)
            self._most = max(_FEW, 2 * len(self._limits))
        self.next_expiry = self._limits[0][0]

    def rest(self) -> None:
        """Reset limits and forecast: the last request has ended."""
        self._limits.clear()
        self._state.last.demoted.clear()
        self.next_expiry = math.inf
        self.forecast.rest()

    def drop(self, now: float, finish: Finish) -> list[Expired]:
        """End waiting requests that were never started, and their forks: those past their limit on
        waiting, and those that were demoted and would now be refused. Returns the errors for their
        callers."""
        dropped: list[Expired] = []
        while self._limits and self._limits[0][0] <= now:
            request = heapq.heappop(self._limits)[2]
            if _never_started(request):
                waited = now - request.asked.arrival_time
                why = f"it waited {waited:.1f} s without being started"
                dropped.append(self._expiry(request, "expired", why, finish, now))
        self.next_expiry = self._limits[0][0] if self._limits else math.inf
        demoted, self._state.last.demoted = self._state.last.demoted, []
        for request in demoted:
            if not _never_started(request) or request.asked.slo.best_effort:
                continue
            waited, longest = now - request.asked.arrival_time, self._longest_wait(request)
            predicted = self.forecast.predict(request)
            if predicted is not None and waited + predicted > longest:
                why = f"its first token is late and predicted to take {waited + predicted:.1f} s, "
                why += f"the limit is {longest:g} s"
                dropped.append(self._expiry(request, "predicted-ttft", why, finish, now))
        return dropped

    def _expiry(
        self, request: Request, reason: str, why: str, finish: Finish, now: float
    ) -> Expired:
        forks = tuple(self._state.forks.by_parent.get(request.request_id, ()))
        for each in (*forks, request):
            finish(each, FinishReason.ABORT)
        # predict after it has left the queue, or it would count as waiting ahead of itself
        seconds = self.forecast.predict(request)
        if reason != "expired" and seconds is not None:
            seconds = self._room_in(request, seconds, now)
        error = self._refusal(reason, why, seconds)
        self._state.totals.refused[reason] += 1
        return Expired(request.request_id, error, tuple(fork.request_id for fork in forks))


def longest_wait(most: float | None, asked: Slo, ttft: float | None) -> float:
    """Return the predicted seconds to the first token above which a request is refused.

    Args:
        most: ``SchedulerConfig.max_predicted_ttft_s``.
        asked: the caller's targets.
        ttft: its target, or the policy's default.
    """
    if most is None or asked.best_effort:
        return math.inf
    return max(most, _TARGETS_WAITED * (ttft or 0.0))


def _never_started(request: Request) -> bool:
    return request.status is RequestStatus.WAITING and request.first_scheduled_time is None


def check_admissible(
    request: Request, live: Mapping[str, Request], config: SchedulerConfig, cache: CacheConfig
) -> None:
    """Return if an empty engine could serve ``request``.

    Args:
        live: requests that have not ended, by id.

    Raises:
        NeverFitsError: prompt + max_tokens exceed the context or the whole KV cache.
        InvalidRequestError: empty prompt, duplicate id, unknown ``fork_of``.
    """
    asked, prompt = request.asked, request.num_prompt_tokens
    # a pooled request generates no token
    output = asked.sampling.max_tokens if asked.sampling.pooling is None else 0
    if prompt == 0:
        raise InvalidRequestError("the prompt is empty: at least 1 token is needed", "prompt")
    if request.request_id in live:
        raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
    if prompt + output > config.max_model_len:
        raise NeverFitsError(
            f"{prompt} prompt tokens + {output} output tokens = {prompt + output} exceed "
            f"the maximum context length of {config.max_model_len} tokens",
            "max_tokens",
        )
    if asked.resumed is not None:
        _check_resumed(request, asked.resumed.token_ids)
    # the last sampled token is never fed back, so it needs no space in the cache
    needed = blocks_for(request.max_total_tokens - 1, cache.block_size)
    if needed > cache.num_blocks:
        raise NeverFitsError(
            f"{prompt} prompt tokens + {output} output tokens need {needed} KV blocks of "
            f"{cache.block_size} tokens; the whole cache has {cache.num_blocks}",
            "max_tokens",
        )
    if asked.fork_of is not None:
        parent = live.get(asked.fork_of)
        if parent is None or parent.asked.prompt_token_ids != asked.prompt_token_ids:
            raise InvalidRequestError(
                f"fork_of={asked.fork_of!r} names no live request with the same prompt", "n"
            )


def _check_resumed(request: Request, token_ids: tuple[int, ...]) -> None:
    """Raise InvalidRequestError if an output has already ended with these tokens."""
    sampling = request.asked.sampling
    if len(token_ids) >= sampling.max_tokens:
        why = f"max_tokens={sampling.max_tokens} counts them: nothing is left to generate"
        message = f"resume_output_ids holds {len(token_ids)} tokens, and {why}"
        raise InvalidRequestError(message, "resume_output_ids")
    for position, token_id in enumerate(token_ids, 1):
        if token_id in request.stop_ids and position >= sampling.min_tokens:
            where = f"at position {position - 1} of {len(token_ids)}"
            why = f"resume_output_ids has token {token_id}, which ends the output, {where}"
            raise InvalidRequestError(why, "resume_output_ids")
