"""The door: requests refused before they are queued, and dropped before they are started.

``check_door`` refuses what can never be served. ``Door`` refuses, with an honest time to come back,
what cannot be served soon: the queue is full, the memory-pressure valve is wide open, or the first
token is predicted to take longer than the server allows. It hands out requests that waited past
their own limit.

This module does not know the order of the queue.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.errors import InvalidRequestError, NeverFitsError, QueueFullError
from paceline.core.memory.kv_cache import blocks_for, fits
from paceline.core.memory.pressure import Pressure
from paceline.core.pacing.first_token import ArrivalForecast
from paceline.core.pacing.tenants import TenantShares
from paceline.core.request import Request, RequestStatus
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Move

__all__ = ["Door", "Expired", "QueueLimits", "check_door"]

# advised wait where nothing was measured yet
_RETRY_SECONDS: Final = 1.0
# and at least: a caller that comes back at once is refused again
_LEAST_RETRY: Final = 0.1
# waiting requests of one tenant for every place that is left in the queue, at most
_PER_PLACE: Final = 7
# limits on waiting until those of requests that do not wait any more are dropped, at least
_FEW: Final = 64


class Expired(NamedTuple):
    """A request that was dropped before it was started."""

    request_id: str
    error: QueueFullError
    # those that waited for its prompt and were dropped with it
    fork_ids: tuple[str, ...] = ()


class Door:
    """Lets requests in, or not. One per scheduler.

    Args:
        tenants: None where they are not kept apart.
    """

    def __init__(self, state: SchedulerState, tenants: TenantShares | None) -> None:
        self._state = state
        self._tenants = tenants
        self.forecast = ArrivalForecast(state)
        self.limits = QueueLimits(state.config)

    def check(self, request: Request, live: Mapping[str, Request]) -> None:
        """Return if the request may be queued; what is known of it then is written down in it.

        Raises:
            NeverFitsError, InvalidRequestError: it can never be served, see ``check_door``.
            QueueFullError: it cannot be served soon, see ``QueueLimits.check``.
        """
        state, limits, tenants = self._state, self.limits, self._tenants
        check_door(request, live, state.config, state.cache)
        tenant, num_forks = request.asked.tenant, request.asked.num_forks
        if tenants is not None and tenants.is_light(tenant):
            request.move(Move.FAVOUR)
        if request.asked.fork_of is not None:
            # the queue had places for all forks when their parent came
            request.key = state.policy.key(request)
            return
        waiting = len(state.waiting) + len(state.forks)
        if state.last.held_by is None:
            # arrivals since the last plan, which free places take in the next one
            free = state.config.max_num_seqs - len(state.running.requests)
            waiting = max(0, waiting - free)
        if not limits.is_full(waiting, num_forks):
            state.kv.hash_prompt(request)
            request.num_new_tokens = request.num_prompt_tokens - state.kv.num_found(request)
        request.key = state.policy.key(request)
        request.order = (request.key, 0)
        self.forecast.note(request)
        own = 0
        if (
            tenants is not None
            and limits.is_crowded(waiting, num_forks)
            and tenants.has_others(tenant)
        ):
            running = sum(r.asked.tenant == tenant for r in state.running.requests)
            own = tenants.unfinished(tenant) - running + num_forks
        limits.check(
            waiting, request.history.predicted_ttft, state.valve.level, own, num_forks=num_forks
        )

    def expiry(self, request: Request, forks: Iterable[Request], now: float) -> Expired:
        """What to tell the caller of a request that was dropped, which is queued no more."""
        return self.limits.expiry(request, forks, now, self.forecast.predict(request))


class QueueLimits:
    """Refusals for now, and limits on waiting."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        # (when, order of arrival, request)
        self._limits: list[tuple[float, int, Request]] = []
        # how many of them there may be until then
        self._most = _FEW
        # when ``expired`` has something to say at the earliest
        self.next_expiry = math.inf
        # by QueueFullError.reason
        self.refused: Counter[str] = Counter()

    def is_full(self, num_waiting: int, num_forks: int = 0) -> bool:
        """Whether ``check`` refuses a request with so many forks. None is refused for an empty
        queue: one with more forks than there are places would never be served."""
        limit = self._config.max_num_waiting
        return limit is not None and num_waiting > 0 and num_waiting + num_forks >= limit

    def is_crowded(self, num_waiting: int, num_forks: int = 0) -> bool:
        """Whether it matters for ``check`` which tenants' requests wait."""
        limit = self._config.max_num_waiting
        taken = num_waiting + num_forks
        return limit is not None and num_waiting > 0 and taken >= _PER_PLACE * (limit - taken)

    def check(
        self,
        num_waiting: int,
        predicted: float | None,
        pressure: Pressure,
        num_own: int = 0,
        *,
        num_forks: int = 0,
    ) -> None:
        """Return if one more request may be queued.

        Where tenants are kept apart and there are several, one of them may have no more requests in
        the queue than ``_PER_PLACE`` times the places that are left: a flood takes seven eighths of
        all, and other tenants find a place. A second flood takes seven eighths of what the
        first has left, and so on: several can fill the queue. It is the dynamic threshold of shared
        packet buffers (Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998); no waiting request is dropped
        for it, and it needs no number of tenants.

        Args:
            num_waiting: requests that wait already.
            num_own: those of them and of the forks that are the newcomer's tenant's; 0 where
                tenants are not kept apart or no other one asks.
            num_forks: of the newcomer, which want places as well.
            predicted: seconds to the first token of this one; None: not known.
            pressure: the valve's level.

        Raises:
            QueueFullError: not now.
        """
        config = self._config
        wanted = f", and this one has n={num_forks + 1} choices" if num_forks else ""
        if self.is_full(num_waiting, num_forks):
            raise self._refusal(
                "queue-full",
                f"{num_waiting} requests wait already, the limit is {config.max_num_waiting}"
                + wanted,
                predicted,
            )
        if num_own and self.is_crowded(num_waiting, num_forks):
            limit = config.max_num_waiting
            assert limit is not None, "only then it is crowded"
            left = limit - num_waiting - num_forks
            if num_own >= _PER_PLACE * left:
                raise self._refusal(
                    "queue-share",
                    f"{num_own - num_forks} requests of this tenant wait already, and the "
                    f"{limit - num_waiting} places left of {limit} are for others" + wanted,
                    predicted,
                )
        longest = config.max_predicted_wait_s
        if longest is not None and predicted is not None and predicted > longest:
            raise self._refusal(
                "predicted-wait",
                f"the first token is predicted to take {predicted:.1f} s, the limit is "
                f"{longest:g} s",
                predicted - longest,
            )
        if pressure >= Pressure.REFUSE and num_waiting:
            raise self._refusal(
                "pressure",
                f"KV memory is nearly full and {num_waiting} requests wait for it",
                predicted,
            )

    def _refusal(self, reason: str, why: str, seconds: float | None) -> QueueFullError:
        self.refused[reason] += 1
        wait = _RETRY_SECONDS if seconds is None else max(seconds, _LEAST_RETRY)
        return QueueFullError(f"not accepted: {why}; retry in {wait:.1f} s", wait, reason)

    def limit(self, request: Request) -> None:
        """Watch over how long a queued request, whose order is known, waits to be started."""
        number = request.order[1]
        limits = (request.asked.slo.queue_ttl, self._config.queue_timeout_s)
        shortest = min((limit for limit in limits if limit is not None), default=None)
        if shortest is not None:
            heapq.heappush(self._limits, (request.asked.arrival_time + shortest, number, request))
            if len(self._limits) > self._most:
                # those that ended keep their prompts alive no longer
                self._limits = [e for e in self._limits if e[2].status is RequestStatus.WAITING]
                heapq.heapify(self._limits)
                self._most = max(_FEW, 2 * len(self._limits))
            self._set_next_expiry()

    def rest(self) -> None:
        """The last request has ended."""
        self._limits.clear()
        self.next_expiry = math.inf

    def expired(self, now: float) -> list[Request]:
        """Requests whose time to be started is over; the caller skips those that were."""
        found = []
        while self._limits and self._limits[0][0] <= now:
            found.append(heapq.heappop(self._limits)[2])
        self._set_next_expiry()
        return found

    def _set_next_expiry(self) -> None:
        self.next_expiry = self._limits[0][0] if self._limits else math.inf

    def expiry(
        self, request: Request, forks: Iterable[Request], now: float, predicted: float | None
    ) -> Expired:
        """What to tell the caller of one that was not, given how long it would take now."""
        waited = now - request.asked.arrival_time
        error = self._refusal(
            "expired", f"it waited {waited:.1f} s without being started", predicted
        )
        return Expired(request.request_id, error, tuple(fork.request_id for fork in forks))


def check_door(
    request: Request,
    live: Mapping[str, Request],
    config: SchedulerConfig,
    cache: CacheConfig,
) -> None:
    """Return if ``request`` can be served some day on an empty engine.

    Args:
        live: requests already known, by id.

    Raises:
        NeverFitsError: prompt + max_tokens exceed the context or the whole KV cache.
        InvalidRequestError: empty prompt, duplicate id, unknown ``fork_of``.
    """
    prompt, output = request.num_prompt_tokens, request.asked.sampling.max_tokens
    if prompt == 0:
        raise InvalidRequestError("the prompt is empty: at least 1 token is needed", "prompt")
    if request.request_id in live:
        raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
    if request.max_total_tokens > config.max_model_len:
        raise NeverFitsError(
            f"{prompt} prompt tokens + {output} output tokens = {request.max_total_tokens} exceed "
            f"the maximum context length of {config.max_model_len} tokens",
            "max_tokens",
        )
    # the last sampled token is never fed back, so it needs no place
    stored = request.max_total_tokens - 1
    if not fits(stored, block_size=cache.block_size, num_blocks=cache.num_blocks):
        raise NeverFitsError(
            f"{prompt} prompt tokens + {output} output tokens need "
            f"{blocks_for(stored, cache.block_size)} KV blocks of {cache.block_size} tokens; "
            f"the whole cache has {cache.num_blocks}",
            "max_tokens",
        )
    if request.asked.fork_of is not None:
        parent = live.get(request.asked.fork_of)
        if parent is None or parent.asked.prompt_token_ids != request.asked.prompt_token_ids:
            raise InvalidRequestError(
                f"fork_of={request.asked.fork_of!r} names no live request with the same prompt", "n"
            )
