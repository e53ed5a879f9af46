"""Scheduling policies, one file each. Add one by adding a file and a line in ``POLICIES``, or from
another package through the entry point group ``paceline.policies``."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import ConfigError
from paceline.core.policies.base import PolicyContext, SchedulingPolicy
from paceline.core.policies.boost import BoostPolicy
from paceline.core.policies.deadline import DeadlinePolicy
from paceline.core.policies.fair import FairPolicy
from paceline.core.policies.fcfs import FcfsPolicy
from paceline.core.policies.phase_aligned import PhaseAlignedPolicy
from paceline.core.policies.priority import PriorityPolicy
from paceline.core.policies.sjf import SjfPolicy

__all__ = [
    "POLICIES",
    "BoostPolicy",
    "DeadlinePolicy",
    "FairPolicy",
    "FcfsPolicy",
    "PhaseAlignedPolicy",
    "PolicyContext",
    "PriorityPolicy",
    "SchedulingPolicy",
    "SjfPolicy",
    "make_policy",
]

POLICIES: dict[str, Callable[[PolicyContext], SchedulingPolicy]] = {
    "fcfs": FcfsPolicy,
    "sjf": SjfPolicy,
    "priority": PriorityPolicy,
    "boost": BoostPolicy,
    "deadline": DeadlinePolicy,
    "fair": FairPolicy,
    "phase-aligned": PhaseAlignedPolicy,
}


def make_policy(context: PolicyContext) -> SchedulingPolicy:
    """The policy that ``context.config.policy`` names.

    Raises:
        ConfigError: no such policy; the message lists them.
    """
    name = context.config.policy
    try:
        make = POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"unknown scheduling policy {name!r}; known: {known}") from None
    return make(context)
