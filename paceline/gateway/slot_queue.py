"""Requests that wait at the gateway because every engine of their model has as many as it may have.

Who goes next is decided by the scheduler that runs the engines, ``core.Scheduler``, with dispatches
for steps: a request is a prompt of one token, a step has room for one, and a step is planned when
an engine has a place. So policies, tenants' shares, targets, the bound on the queue, predicted
waits and time limits are the engine's own, and the simulator makes the same decisions from the same
arrivals: what a step takes there is the time between two free places here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.core.pacing.door import Expired
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.slo import NO_SLO, Slo

__all__ = ["Queued", "SlotQueue", "slot_scheduler"]

# a request holds one block of that many tokens, whatever it asks for
_BLOCK: Final = 1 << 20
# between two places, at least: a step takes some time
_MIN_SECONDS: Final = 1e-6
_TOKEN: Final = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """What the queue knows of a request."""

    request_id: str
    arrival: float
    # expected
    output_tokens: int
    priority: int = 0
    tenant: str = ""
    slo: Slo = NO_SLO


def slot_scheduler(
    policy: str, *, max_waiting: int | None = None, timeout: float | None = None
) -> tuple[SchedulerConfig, CacheConfig]:
    """Of a scheduler whose step is the dispatch of one request."""
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


class SlotQueue:
    """Of one model. Pure: seconds of a clock that does not go back are an argument.

    Args:
        policy: as of ``paceline serve --scheduling-policy``.
        max_waiting: requests at once; None: no bound.
        timeout: seconds after which one that waits is dropped; None: never.

    Raises:
        ConfigError: an unknown policy, or a bad bound.
    """

    def __init__(
        self, policy: str, *, max_waiting: int | None = None, timeout: float | None = None
    ) -> None:
        config, cache = slot_scheduler(policy, max_waiting=max_waiting, timeout=timeout)
        self._scheduler = Scheduler(config, cache)
        # the latest dispatch, until the next place is free
        self._step: tuple[SchedulerOutput, float] | None = None

    def __len__(self) -> int:
        return self._scheduler.stats().num_waiting

    def add(self, queued: Queued) -> None:
        """Raises QueueFullError with a predicted wait."""
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
        """Its caller is gone; unknown ids are ignored."""
        self._scheduler.abort((request_id,))

    def free(self, now: float) -> None:
        """A place is free: the dispatch before took until now."""
        if self._step is None:
            return
        (plan, began), self._step = self._step, None
        seconds = max(_MIN_SECONDS, now - began)
        result = StepResult(step_id=plan.step_id, sampled=((_TOKEN,),), elapsed=seconds)
        self._scheduler.update(plan, result, now, tell_all=False)
        # what is still to come of it is the engine's
        self._scheduler.abort((plan.rows[0].request_id,))

    def next(self, now: float) -> str | None:
        """The request that gets the place that is free; None: none waits, or its policy holds all
        of them back. ``expired`` tells which were dropped instead."""
        assert self._step is None, "no place is free"
        plan = self._scheduler.schedule(now)
        if not plan.rows:
            return None
        self._step = plan, now
        return plan.rows[0].request_id

    def expired(self) -> Sequence[Expired]:
        """Requests that had waited too long when ``next`` was called, once each."""
        return self._scheduler.take_expired()

    def check_integrity(self) -> None:
        """AssertionError unless the scheduler's books are in order."""
        self._scheduler.check_integrity()
