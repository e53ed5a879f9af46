"""A step and its limits: the interface between plain steps and all code for targets.

A ``Pacing`` makes a new object for each step. ``Plain`` is the null object: its steps serve
requests without targets, and no code for targets or tenants is on their call path.
``pacing.paced.Paced`` is the other one.

::

    step = pacing.begin(now, starts, held=...)           tokens, passes, gates
    for part in step.passes:
        rows for part.running, then for part.must_run
        admit waiting requests up to tier part.last      step.next / demotes / obstacle / admitted
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.core.outputs import BlockCopy, NewRequest, ScheduledRow
from paceline.core.policies import overrides
from paceline.core.predict.step_time import AdapterWork, StepShape
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Request
from paceline.core.step.displacement import displace
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Pacing", "Pass", "Plain", "Step"]

# calling tuple's constructor for a NamedTuple takes half the time of calling its own
_new = tuple.__new__


class Pass(NamedTuple):
    """Part of a step: rows for running requests of some tiers, then admissions of these tiers."""

    # running requests in the order in which they get rows
    running: list[Request]
    # requests of later tiers, one token behind, that must not skip this step
    must_run: list[Request]
    # last tier of the waiting requests to admit
    last: Tier


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """A plain step with its rows so far, and the base class of others. One object per step."""

    state: SchedulerState
    # time at which the step is planned
    now: float
    # tokens left to hand out
    budget: int
    # prompt tokens of the step without memory pressure, for forecasts
    chunk_tokens: int
    # in order; one token is kept for every running request of later passes
    passes: Sequence[Pass]
    # prompt tokens kept for a request for which others were preempted
    reserved: int
    # prompt tokens kept for a running request of a later pass
    kept: int = 0
    # best effort with deadlines comes before those that missed their targets
    pressing: bool = False
    # a best-effort request to preempt before anything is planned
    evicted: Request | None = None
    # predicted seconds of the step above which best-effort rows stay out; infinite: no limit
    seconds: float = math.inf
    # the same for best effort without targets, whose rows are then metered
    background_seconds: float = math.inf
    # predicted seconds of ordinary rows alone; None: there are no other rows
    ordinary_seconds: float | None = None
    # whether the step takes wide rows: alone if the policy does not mix
    wide: bool = True
    # the parts of ``shape``
    wide_tokens: int = 0
    wide_keys: float = 0.0
    narrow_rows: int = 0
    narrow_keys: int = 0
    # the rows so far, and the request of each
    rows: list[ScheduledRow] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    # forks that got their blocks in this step, and may run from the next one on
    forked: list[Request] = field(default_factory=list)

    @property
    def shape(self) -> StepShape:
        """The shape of the rows so far."""
        return StepShape(self.wide_tokens, self.wide_keys, self.narrow_rows, self.narrow_keys)

    def add(self, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]) -> None:
        """Give a request its next missing tokens, and count them as computed."""
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = end == request.num_tokens + request.num_pending_tokens
        self.rows.append(
            _new(ScheduledRow, (request.request_id, start, num_tokens, new_block_ids, samples))
        )
        self.requests.append(request)
        self.budget -= num_tokens
        request.num_computed_tokens = end
        if samples:
            request.num_pending_tokens += 1
        if num_tokens > 1:
            request.history.num_chunks += 1
            self.wide_tokens += num_tokens
            self.wide_keys += num_tokens * (start + num_tokens / 2)
        else:
            self.narrow_rows += 1
            self.narrow_keys += start

    def adapter_work(self) -> AdapterWork:
        """Return what the adapters of the rows so far cost."""
        sizes: dict[int, int] = {}
        products = 0
        for request, row in zip(self.requests, self.rows, strict=True):
            if (adapter := request.asked.adapter) is not None:
                sizes[adapter.slot] = adapter.num_bytes
                products += adapter.num_products * row.num_tokens
        return AdapterWork(sum(sizes.values()), products)

    def count_plain(self, num_rows: int, num_keys: int) -> None:
        """Count rows of one token that ``Rows`` added itself; ``num_keys`` tokens precede them."""
        self.budget -= num_rows
        self.narrow_rows += num_rows
        self.narrow_keys += num_keys

    def lengthen(self, index: int, count: int, new_block_ids: tuple[int, ...]) -> None:
        """Lengthen a row of one token by ``count`` draft tokens, for which there are blocks."""
        request_id, start, num_tokens, block_ids, samples = self.rows[index]
        row = request_id, start, num_tokens + count, block_ids + new_block_ids, samples
        self.rows[index] = _new(ScheduledRow, row)
        self.requests[index].lengthen(count)
        # they cost the same as rows of one token, except for the keys, which a row reads once
        self.count_plain(count, 0)

    def next(self, last: Tier, passed: Sequence[Request]) -> Request | Reason | None:
        """Return the waiting request to try next in a pass up to tier ``last``, or why none is
        tried; ``passed`` were tried in this pass and not admitted."""
        state = self.state
        head = state.waiting.ordinary.peek()
        if head is None:
            return None
        if self.budget <= 0:
            return Reason.BUDGET
        is_full = len(state.running.requests) >= state.config.max_num_seqs
        return Reason.SLOTS if is_full else head

    def demotes(self, request: Request, passed: Sequence[Request]) -> bool:
        """Return whether the request, just taken from the queue, was moved to a later tier."""
        return False

    def stands_aside(self, request: Request, last: Tier) -> bool:
        """Whether a request that does not fit, in a pass up to tier ``last``, holds no other up."""
        return request.tier > last

    def obstacle(self, request: Request) -> Reason | None:
        """Return the reason other than memory that keeps the request out; None: there is none."""
        return None

    def admitted(self, request: Request) -> None:
        """Note that the request was admitted; it gets its first row next."""

    def takes(self, request: Request) -> bool:
        """Whether a running request of a later pass gets a row."""
        return True

    def chunk(self, request: Request, *, admission: bool) -> int:
        """Return the tokens of the largest chunk of a best-effort request that fits the step."""
        return max(1, self.budget)

    def lengthened(self, before: StepShape) -> None:
        """Note that best effort was added to the step, before which it had this shape."""

    def first_pass_done(self, num_must_run: int) -> None:
        """Note that the first of several passes is over; ``num_must_run`` rows are best effort."""


class Pacing(Protocol):
    """Begins steps. The scheduler calls one of two, see ``Scheduler``."""

    def begin(self, now: float, starts: float, *, held: bool) -> Step:
        """Return the step that is planned now, without rows. Moves requests between tiers first,
        and preempts running requests for a better waiting one. The budget is at least a token for
        each running request, plus one. The step is predicted to begin at ``starts``; ``held``: the
        policy admits no request for now."""


class Plain:
    """The null object of ``Pacing``: steps are no larger than throughput needs, running requests
    get their tokens first, and waiting ones are admitted in the policy's order."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # other policies displace no request without best effort
        self._displaces = overrides(state.policy, "displaces")

    def begin(self, now: float, starts: float, *, held: bool) -> Step:
        state = self._state
        running = state.running.requests
        num_running, tokens = len(running), state.chunk.plain_tokens(running)
        head = state.waiting.ordinary.peek() if self._displaces and not held else None
        reserved = 0 if head is None else displace(state, head, now, state.policy.displaces)
        return Step(
            budget=state.valve.cap(tokens, num_running), state=state, now=now,
            chunk_tokens=tokens - num_running, reserved=reserved,
            passes=(Pass(list(running), [], Tier.ORDINARY),),
        )  # fmt: skip
