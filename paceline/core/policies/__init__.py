"""Scheduling policies, one file each. Add one by adding a file and a line in ``POLICIES``, or from
another package through the entry point group ``paceline.policies``."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.policies.deadline import DeadlinePolicy
from paceline.core.policies.fair import FairPolicy
from paceline.core.policies.fcfs import FcfsPolicy, PolicyContext, overrides
from paceline.core.policies.phase_aligned import PhaseAlignedPolicy
from paceline.core.policies.priority import PriorityPolicy
from paceline.core.policies.sjf import SjfPolicy
from paceline.core.policies.static import StaticPolicy
from paceline.errors import ConfigError

__all__ = [
    "POLICIES", "DeadlinePolicy", "FairPolicy", "FcfsPolicy", "PhaseAlignedPolicy", "PolicyContext",
    "PriorityPolicy", "SjfPolicy", "StaticPolicy", "make_policy", "overrides",
]  # fmt: skip

_MEMBERS = sorted(name for name in vars(FcfsPolicy) if not name.startswith("_"))

POLICIES: dict[str, Callable[[PolicyContext], FcfsPolicy]] = {
    "fcfs": FcfsPolicy,
    "sjf": SjfPolicy,
    "priority": PriorityPolicy,
    "deadline": DeadlinePolicy,
    "fair": FairPolicy,
    "phase-aligned": PhaseAlignedPolicy,
    "static": StaticPolicy,
}


def make_policy(context: PolicyContext) -> FcfsPolicy:
    """Return the policy that ``context.config.policy`` names.

    Raises:
        ConfigError: no such policy, or one from another package that lacks a member.
    """
    name = context.config.policy
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"unknown scheduling policy {name!r}; known: {known}")
    policy = POLICIES[name](context)
    # one that was written for an older version, and is not derived from FcfsPolicy
    lacking = [member for member in _MEMBERS if not hasattr(policy, member)]
    if lacking:
        raise ConfigError(
            f"scheduling policy {name!r} ({type(policy).__qualname__}) has no "
            f"{', '.join(lacking)}; derive it from FcfsPolicy"
        )
    return policy
