"""What the parts of one scheduler share.

This module does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.policies import SchedulingPolicy
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.queues.forks import Forks
from paceline.core.queues.running import RunningList
from paceline.core.queues.wait_clocks import Reason
from paceline.core.queues.waiting import WaitingRoom
from paceline.core.step.in_flight import StepsInFlight

__all__ = ["SchedulerState"]


@dataclass(slots=True)
class LastPlan:
    """What the last plan found, for forecasts between plans."""

    # prompt tokens that the step could take
    chunk_tokens: int
    # what held the head of the queue up; None: nothing did
    held_by: Reason | None = None
    # of plans, results and ends of requests: what was seen under another number is out of date
    version: int = 0
    # of requests that ran undisturbed until their first token since forecasts were last asked for:
    # (predicted seconds to it, the bias in that, what it really took)
    first_tokens: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Made by the scheduler, which owns all of it; the members change, the references do not."""

    config: SchedulerConfig
    cache: CacheConfig
    policy: SchedulingPolicy
    # seconds of a step, learned online, and how many tokens requests will have
    step_time: StepTimeModel
    work: WorkEstimator
    kv: KVCacheManager
    waiting: WaitingRoom
    forks: Forks
    running: RunningList
    # steps whose results are not in
    steps: StepsInFlight
    last: LastPlan
