"""Queue of requests that wait because all engines of their model are at ``max_concurrent``.

Its order is decided by the scheduler that runs the engines, ``core.Scheduler``, with dispatches in
place of steps: a request is a prompt of one token, a step has room for one, and a step is planned
when an engine has a free slot. So policies, tenants' shares, targets, the queue's bound, predicted
waits and time limits are the engine's own, and the simulator makes the same decisions from the same
arrivals: its step time is here the time between two free slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.core.pacing.request_admission import Expired
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.slo import NO_SLO, Slo

__all__ = ["EndpointQueue", "Queued", "slot_scheduler"]

# tokens of the one block that every request holds
_BLOCK: Final = 1 << 20
# least seconds between two free slots, as a step takes some time
_MIN_SECONDS: Final = 1e-6
_TOKEN: Final = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """A request as the queue knows it."""

    request_id: str
    arrival: float
    # expected number
    output_tokens: int
    priority: int = 0
    tenant: str = ""
    slo: Slo = NO_SLO


def slot_scheduler(
    policy: str, *, max_waiting: int | None = None, timeout: float | None = None
) -> tuple[SchedulerConfig, CacheConfig]:
    """Configure a scheduler whose step is the dispatch of one request."""
    return (
        SchedulerConfig(
            policy=policy,
            max_num_batched_tokens=1,
            max_num_seqs=1,
            max_model_len=_BLOCK,
            adaptive_token_budget=False,
            max_num_waiting=max_waiting,
            queue_timeout_s=timeout,
        ),
        CacheConfig(block_size=_BLOCK, num_blocks=2, enable_prefix_caching=False),
    )


class EndpointQueue:
    """Queue of one model. Pure: times are arguments, in seconds of a monotonic clock.

    Args:
        policy: as for ``paceline serve --scheduling-policy``.
        max_waiting: requests that may wait; None: no bound.
        timeout: seconds after which a waiting request expires; None: never.

    Raises:
        ConfigError: an unknown policy, or a bad bound.
    """

    def __init__(
        self, policy: str, *, max_waiting: int | None = None, timeout: float | None = None
    ) -> None:
        config, cache = slot_scheduler(policy, max_waiting=max_waiting, timeout=timeout)
        self._scheduler = Scheduler(config, cache)
        # the latest dispatch, until the next slot is free
        self._step: tuple[SchedulerOutput, float] | None = None

    def __len__(self) -> int:
        return self._scheduler.stats().num_waiting

    def add(self, queued: Queued) -> None:
        """Add a request. Raises QueueFullError with a predicted wait."""
        self._scheduler.add_request(
            Request(
                RequestSpec(
                    request_id=queued.request_id,
                    prompt_token_ids=[_TOKEN],
                    sampling=SamplingParams(max_tokens=max(1, queued.output_tokens)),
                    arrival_time=queued.arrival,
                    priority=queued.priority,
                    tenant=queued.tenant,
                    slo=queued.slo,
                )
            )
        )

    def leave(self, request_id: str) -> None:
        """Remove a request whose caller is gone; unknown ids are ignored."""
        self._scheduler.abort((request_id,))

    def free(self, now: float) -> None:
        """Note a free slot: the dispatch before took until now."""
        if self._step is None:
            return
        (plan, began), self._step = self._step, None
        seconds = max(_MIN_SECONDS, now - began)
        result = StepResult(step_id=plan.step_id, sampled=((_TOKEN,),), elapsed=seconds)
        self._scheduler.update(plan, result, now, tell_all=False)
        # the engine does the rest of the request
        self._scheduler.abort((plan.rows[0].request_id,))

    def next(self, now: float) -> str | None:
        """Return the request that gets the free slot; None: none waits, or the policy holds all of
        them back. ``expired`` returns those that were dropped instead."""
        assert self._step is None, "no slot is free"
        plan = self._scheduler.schedule(now)
        if not plan.rows:
            return None
        self._step = plan, now
        return plan.rows[0].request_id

    def expired(self) -> Sequence[Expired]:
        """Return requests that had waited too long when ``next`` was called, once each."""
        return self._scheduler.take_expired()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the scheduler's state is consistent."""
        self._scheduler.check_integrity()
