"""The interface of a policy, and the information it gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.config import SchedulerConfig
from paceline.core.predict.output_length import WorkEstimator
from paceline.core.queues.request_queue import WaitingQueue
from paceline.core.request import Request
from paceline.core.slo import Slo

__all__ = ["PolicyContext", "SchedulingPolicy"]


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Information for a policy, at birth."""

    config: SchedulerConfig
    # forecast of the engine's seconds for a request, learned online
    work: WorkEstimator


class SchedulingPolicy(Protocol):
    """Order, victim and gate. Deterministic: equal calls give equal results.

    A key is fixed when a request is added, so queues are heaps; a term that grows with waiting time
    must be linear in it (both sides of a comparison age alike, and ``now`` cancels).
    """

    # False: a step computes either rows of one token or longer ones
    mixes: bool
    # True: a tenant's requests are never left out to keep another tenant's on time
    keeps_tenants_apart: bool
    # True: while answers stream, steps last at most ``SchedulerConfig.max_token_gap_s``
    bounds_gaps: bool
    # increase of a request's key for each second that it arrives later
    key_per_second: float

    def make_queue(self) -> WaitingQueue:
        """Return a queue of waiting requests. Called once for each ``Tier``, which wait apart."""
        ...

    def assumed(self, request: Request) -> Slo:
        """Return the targets of a request that has just arrived: its own, or defaults if it has
        none."""
        ...

    def key(self, request: Request) -> float:
        """Return the request's key: a smaller one runs sooner, equal ones in order of arrival.
        Called once, on arrival, before the request may be refused."""
        ...

    def service_order(self, waiting: Mapping[str, Sequence[Request]]) -> Iterable[Request]:
        """Yield waiting requests in the predicted order of admission. They are given in order: by
        tenant if the policy keeps tenants apart, else all in one row."""
        ...

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        """Return the requests, in order, that should give up blocks before others when the pool is
        empty; the work that each would lose decides among them. ``candidates`` is in order and not
        empty, and neither is the result."""
        ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether ``running`` is preempted to admit ``waiting``. Called only if ``waiting`` comes
        first by ``queues.running.place``, or two requests would displace each other for ever; and
        ``running``, once it waits too, must not be admitted before ``waiting``, or both would swap
        in every step: a request of a later ``Tier`` displaces none of an earlier one, and none
        displaces a ``granted`` one."""
        ...

    def holds_until(self, waiting: WaitingQueue, num_running: int, now: float) -> float | None:
        """Return None to admit waiting requests, or the latest time to ask again."""
        ...

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        """Count tokens just spent on a request: uncached prompt tokens when it is first admitted,
        then output tokens, if ``sampled`` passes them on."""
        ...

    def sampled(self, requests: Sequence[Request]) -> None:
        """Count output tokens that a step just sampled: its requests, each once for every token.
        Called once a step; that of ``FcfsPolicy`` calls ``served`` for each token."""
        ...
