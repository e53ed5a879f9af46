"""Scheduling policies, one file each. Add one by adding a file and a line in ``POLICIES``, or from
another package through the entry point group ``paceline.policies``."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.policies.base import PolicyContext, SchedulingPolicy
from paceline.core.policies.deadline import DeadlinePolicy
from paceline.core.policies.fair import FairPolicy
from paceline.core.policies.fcfs import FcfsPolicy, overrides
from paceline.core.policies.phase_aligned import PhaseAlignedPolicy
from paceline.core.policies.priority import PriorityPolicy
from paceline.core.policies.sjf import SjfPolicy
from paceline.errors import ConfigError

__all__ = [
    "POLICIES", "DeadlinePolicy", "FairPolicy", "FcfsPolicy", "PhaseAlignedPolicy", "PolicyContext",
    "PriorityPolicy", "SchedulingPolicy", "SjfPolicy", "make_policy", "overrides",
]  # fmt: skip

# members that a policy written for an older version may lack
_MEMBERS = sorted(
    {*SchedulingPolicy.__annotations__}
    | {name for name in vars(SchedulingPolicy) if not name.startswith("_")}
)

POLICIES: dict[str, Callable[[PolicyContext], SchedulingPolicy]] = {
    "fcfs": FcfsPolicy,
    "sjf": SjfPolicy,
    "priority": PriorityPolicy,
    "deadline": DeadlinePolicy,
    "fair": FairPolicy,
    "phase-aligned": PhaseAlignedPolicy,
}


def make_policy(context: PolicyContext) -> SchedulingPolicy:
    """Return the policy that ``context.config.policy`` names.

    Raises:
        ConfigError: no such policy (the message lists them), or a policy from another package
            that lacks a member.
    """
    name = context.config.policy
    try:
        make = POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"unknown scheduling policy {name!r}; known: {known}") from None
    policy = make(context)
    lacking = [member for member in _MEMBERS if not hasattr(policy, member)]
    if lacking:
        raise ConfigError(
            f"scheduling policy {name!r} ({type(policy).__qualname__}) has no "
            f"{', '.join(lacking)}; derive it from FcfsPolicy, or see SchedulingPolicy"
        )
    return policy
