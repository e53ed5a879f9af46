"""A step and what it may do: the seam between plain steps and all that exists for targets.

A ``Pacing`` begins each step anew. ``Plain`` is the null object: its steps serve requests without
targets, and nothing that exists for targets is on their call path; it does not know tenants or
forecasts either. ``pacing.paced.Paced`` is the other one.

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
from paceline.core.predict.step_time import StepShape
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Request
from paceline.core.step.displacement import make_way
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Pacing", "Pass", "Plain", "Step"]

# a NamedTuple made by tuple's constructor costs half of one made by its own, and there is one for
# every token of every request
_new = tuple.__new__


class Pass(NamedTuple):
    """Part of a step: rows for running requests of some tiers, then admissions of these tiers."""

    # get rows in this order
    running: list[Request]
    # requests of later tiers, one token behind, that must not sit this step out
    must_run: list[Request]
    # waiting requests up to this tier are admitted
    last: Tier


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """A plain step with its rows so far, and the base of others. Made anew for each step."""

    state: SchedulerState
    # when the step is planned
    now: float
    # tokens left to hand out
    budget: int
    # prompt tokens of the step before memory pressure, for forecasts
    chunk_tokens: int
    # in order; a token is kept for every running request of later passes
    passes: Sequence[Pass]
    # prompt tokens kept for a request that others made way for
    reserved: int
    # prompt tokens kept for a running request of a later pass
    kept: int = 0
    # promised best-effort requests come before those that missed their targets
    pressing: bool = False
    # a best-effort request that gives its memory up before anything is planned
    evicted: Request | None = None
    # predicted seconds of the step beyond which best-effort rows stay out of it, and ask ``takes``
    # for that; infinite: they need not ask
    seconds: float = math.inf
    # the same for best effort without targets, whose rows are metered then; infinite: they are not
    background_seconds: float = math.inf
    # predicted seconds of ordinary rows alone; None: there are no others
    ordinary_seconds: float | None = None
    # where the policy does not mix, the step takes wide rows alone, or narrow ones
    wide: bool = True
    # what ``shape`` is made of
    wide_tokens: int = 0
    wide_keys: float = 0.0
    narrow_rows: int = 0
    narrow_keys: int = 0
    # the rows so far, and the request of each
    rows: list[ScheduledRow] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    # forks that got their blocks in this step: copies come before writes, so they may run from the
    # next step on
    forked: list[Request] = field(default_factory=list)

    @property
    def shape(self) -> StepShape:
        """What the rows so far come to."""
        return StepShape(self.wide_tokens, self.wide_keys, self.narrow_rows, self.narrow_keys)

    def add(self, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]) -> None:
        """Give a request the next tokens it lacks, and count them as computed."""
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

    def count_plain(self, num_rows: int, num_keys: int) -> None:
        """Count rows of one token that ``Rows`` added by itself, with the tokens before them."""
        self.budget -= num_rows
        self.narrow_rows += num_rows
        self.narrow_keys += num_keys

    # ------------------------------------------------------------------ admission

    def next(self, last: Tier, passed: Sequence[Request]) -> Request | Reason | None:
        """The waiting request that is tried next, or why no other is tried in this pass.

        Args:
            last: the pass admits requests up to this tier.
            passed: requests that were tried in this pass and not admitted.
        """
        state = self.state
        head = state.waiting.ordinary.peek()
        if head is None:
            return None
        if self.budget <= 0:
            return Reason.BUDGET
        is_full = len(state.running.requests) >= state.config.max_num_seqs
        return Reason.SLOTS if is_full else head

    def demotes(self, request: Request, passed: Sequence[Request]) -> bool:
        """Whether the request, just taken from the queue, was moved to a later tier instead."""
        return False

    def stands_aside(self, request: Request, last: Tier) -> bool:
        """Whether a request that does not fit, of a pass up to tier ``last``, holds no other up."""
        return request.tier > last

    def obstacle(self, request: Request) -> Reason | None:
        """What keeps the request out beside memory; None: nothing does."""
        return None

    def admitted(self, request: Request) -> None:
        """The request was admitted, and gets its first row next."""

    # ------------------------------------------------------------------ rows of later passes

    def takes(self, request: Request) -> bool:
        """Whether a running request of a later pass gets a row."""
        return True

    def chunk(self, request: Request, *, admission: bool) -> int:
        """Tokens of the largest chunk of a best-effort request that there is room for."""
        return max(1, self.budget)

    def lengthened(self, before: StepShape) -> None:
        """Best-effort rows were added in the first pass, or a best-effort request was admitted;
        ``before`` is the step without that."""

    def first_pass_done(self, num_must_run: int) -> None:
        """The first of several passes is over; ``num_must_run`` of its rows are best effort."""


class Pacing(Protocol):
    """Begins steps. The scheduler asks one of two, see ``Scheduler``."""

    def begin(self, now: float, starts: float, *, held: bool) -> Step:
        """The step that is planned now, without rows. Moves requests between tiers first, and
        preempts running requests for a better one that waits. The step's budget is one token for
        each running request and one more at least.

        Args:
            starts: when the step is predicted to start.
            held: the policy admits no request for now.
        """
        ...


class Plain:
    """The null object of ``Pacing``: steps are no larger than brings throughput, running requests
    get their tokens first, and waiting ones are admitted in the policy's order."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # without best effort, the other policies displace no request
        self._displaces = overrides(state.policy, "displaces")

    def begin(self, now: float, starts: float, *, held: bool) -> Step:
        state = self._state
        running = state.running.requests
        num_running, tokens = len(running), state.chunk.plain_tokens(running)
        head = state.waiting.ordinary.peek() if self._displaces and not held else None
        reserved = 0 if head is None else make_way(state, head, now, state.policy.displaces)
        return Step(
            budget=state.valve.cap(tokens, num_running), state=state, now=now,
            chunk_tokens=tokens - num_running, reserved=reserved,
            passes=(Pass(list(running), [], Tier.ORDINARY),),
        )  # fmt: skip
