"""What a policy is asked, and what it may know."""

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
    """Given to a policy at birth."""

    config: SchedulerConfig
    # seconds a request will take of the engine, learned online
    work: WorkEstimator


class SchedulingPolicy(Protocol):
    """Order, victim and gate. Deterministic: the same calls give the same answers.

    A key is fixed when a request is added, so queues are heaps; whatever grows with waiting time
    must be linear in it (both sides of a comparison age alike, and ``now`` cancels).
    """

    # False: a step computes either rows of one token or longer ones
    mixes: bool
    # True: a tenant's requests are never left out so that another's are on time
    keeps_tenants_apart: bool
    # True: beside streams, steps take no longer than ``SchedulerConfig.max_token_gap_s``
    bounds_gaps: bool
    # by how much the key of a request is larger if it comes a second later
    key_per_second: float

    def make_queue(self) -> WaitingQueue:
        """A queue of waiting requests. Called once for each ``Tier``: they wait apart."""
        ...

    def assumed(self, request: Request) -> Slo:
        """The targets of a request that has just come: its own, or what is assumed where it has
        none."""
        ...

    def key(self, request: Request) -> float:
        """Smaller runs sooner; equal keys run in order of arrival. Called once, when it
        arrives, before it may be refused."""
        ...

    def service_order(self, waiting: Mapping[str, Sequence[Request]]) -> Iterable[Request]:
        """Waiting requests, in the order in which they will be admitted as far as can be told. They
        are given in order: by tenant where tenants are kept apart, else all in one row."""
        ...

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        """Requests that should give blocks up before the others when the pool is empty, in order;
        which of them does is decided by the work it would lose. ``candidates`` is in order and not
        empty, and neither is the answer."""
        ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether ``running`` is preempted to let ``waiting`` in. Asked only if ``waiting`` comes
        first by ``queues.running.place``, or two requests would displace each other for ever; and
        ``running``, once it waits too, must not be let in before ``waiting``, or both would change
        places in every step: a request of a later ``Tier`` displaces none of an earlier one, and
        none displaces one that is ``granted`` its place."""
        ...

    def holds_until(self, waiting: WaitingQueue, num_running: int, now: float) -> float | None:
        """None to let waiting requests in, or when to ask again at the latest."""
        ...

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        """Tokens just spent on a request: uncached prompt tokens when it is first let in, then
        output, if ``sampled`` says so."""
        ...

    def sampled(self, requests: Sequence[Request]) -> None:
        """Output tokens that a step just brought: its requests, each once for every token. Called
        once a step; that of ``FcfsPolicy`` calls ``served`` for each token."""
        ...
