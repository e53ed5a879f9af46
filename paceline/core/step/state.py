"""What the parts of one scheduler share.

This module does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.policies import SchedulingPolicy
from paceline.core.predict.load import RecentLoad
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.queues.forks import Forks
from paceline.core.queues.running import RunningList
from paceline.core.queues.waiting import WaitingRoom

__all__ = ["SchedulerState"]


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Made by the scheduler, which owns all of it; the members change, the references do not."""

    config: SchedulerConfig
    cache: CacheConfig
    policy: SchedulingPolicy
    # seconds of a step, learned online, and how many tokens requests will have
    step_time: StepTimeModel
    work: WorkEstimator
    # the share of the time that ordinary requests needed lately
    load: RecentLoad
    kv: KVCacheManager
    waiting: WaitingRoom
    forks: Forks
    running: RunningList
