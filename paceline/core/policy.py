"""Who goes first and who gives way. Add a policy by adding a class and a line in ``POLICIES``.

A policy's key is fixed when a request is added, so queues are heaps and the same events always give
the same plans; anything that grows with waiting time must therefore be linear in it (both sides of a
comparison age alike, and the term ``now`` cancels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.config import SchedulerConfig
from paceline.core.errors import ConfigError
from paceline.core.request import Request

__all__ = [
    "POLICIES",
    "FcfsPolicy",
    "PriorityPolicy",
    "SchedulingPolicy",
    "make_policy",
]


class SchedulingPolicy(Protocol):
    """Order and victim. Pure: the answers depend on the arguments alone."""

    def key(self, request: Request) -> float:
        """Smaller runs sooner; equal keys run in order of arrival. Called once, when added."""
        ...

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Who gives its blocks up when the pool is empty. ``candidates`` is not empty and in
        the policy's order."""
        ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether ``running`` is preempted to let ``waiting`` in. Must be a strict order, or two
        requests would displace each other for ever."""
        ...


class FcfsPolicy:
    """First come, first served; the youngest gives way.

    Wins: predictable, no starvation. Loses: short requests wait behind long ones.
    """

    def key(self, request: Request) -> float:
        return request.arrival_time

    def victim(self, candidates: Sequence[Request]) -> Request:
        return candidates[-1]

    def displaces(self, waiting: Request, running: Request) -> bool:
        return False


class PriorityPolicy:
    """Lower ``priority`` first; it really preempts, and waiting ``ageing_s`` is worth one level.

    Effective priority after waiting w is ``priority - w / ageing_s``. Comparing two requests at any
    time gives the same answer as comparing ``priority + arrival / ageing_s``, which is the key. A
    request displaces another only if it is better both as asked and after ageing, so an old
    low-priority request, once it got in, is left to finish.

    Wins: urgent work overtakes at once. Loses: preempted work is recomputed.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def key(self, request: Request) -> float:
        return request.priority + request.arrival_time / self._ageing_s

    def victim(self, candidates: Sequence[Request]) -> Request:
        return candidates[-1]

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and waiting.order < running.order


POLICIES: dict[str, Callable[[SchedulerConfig], SchedulingPolicy]] = {
    "fcfs": lambda config: FcfsPolicy(),
    "priority": lambda config: PriorityPolicy(config.priority_ageing_s),
}


def make_policy(config: SchedulerConfig) -> SchedulingPolicy:
    """The policy that ``config.policy`` names.

    Raises:
        ConfigError: no such policy; the message lists them.
    """
    try:
        make = POLICIES[config.policy]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"unknown scheduling policy {config.policy!r}; known: {known}") from None
    return make(config)
