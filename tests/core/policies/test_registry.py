"""Policies by name."""

from __future__ import annotations

import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.policies import PolicyContext, make_policy
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepTimeModel
from paceline.errors import ConfigError


def test_unknown_policy_lists_the_known_ones() -> None:
    config = SchedulerConfig(policy="lottery")
    context = PolicyContext(config, WorkEstimator(StepTimeModel(), LengthHistory()))
    with pytest.raises(ConfigError, match="'lottery'; known: deadline, fair, fcfs"):
        make_policy(context)
