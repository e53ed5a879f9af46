"""A plan being written."""

from __future__ import annotations

import math
from typing import Final

from paceline.core.outputs import BlockCopy, NewRequest, ScheduledRow
from paceline.core.request import Request
from paceline.core.step_time import StepShape, StepTimeModel
from paceline.core.token_budget import Allowance

__all__ = ["Draft"]

# a NamedTuple made by tuple's constructor costs half of one made by its own, and there is one for
# every token of every request
_new = tuple.__new__
# a best-effort request that runs gets a token in one of so many steps, however late the others are
_MAX_SKIPPED_STEPS: Final = 8


class Draft:
    """Rows so far and what is left to hand out."""

    def __init__(self, allowance: Allowance) -> None:
        # tokens left to hand out
        self.budget = allowance.tokens
        # predicted seconds beyond which best-effort rows stay out
        self.seconds = allowance.seconds
        # which rows this step takes; both where the policy mixes
        self.narrow = self.wide = True
        # of the rows so far; kept only where ``spares`` needs it
        self._shape = StepShape()
        self.num_tokens = 0
        self.rows: list[ScheduledRow] = []
        self.requests: list[Request] = []
        self.new: list[NewRequest] = []
        self.copies: list[BlockCopy] = []
        # forks that got their blocks in this step: copies come before writes, so they may run
        # from the next step on
        self.forked: list[Request] = []

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
        self.num_tokens += num_tokens
        request.num_computed_tokens = end
        if samples:
            request.num_pending_tokens += 1
        if num_tokens > 1:
            request.num_chunks += 1
        if self.seconds != math.inf:
            self._shape = self._shape.plus(start, num_tokens)

    def spares(self, request: Request, model: StepTimeModel) -> bool:
        """Whether a best-effort request that runs gets a row: not if that is predicted to make the
        step too long for the others, but every so often all the same."""
        if self.seconds == math.inf or not self.rows:
            return True
        if (
            model.predict(self._shape.plus(request.num_computed_tokens, 1)) <= self.seconds
            or request.num_skipped_steps >= _MAX_SKIPPED_STEPS
        ):
            request.num_skipped_steps = 0
            return True
        request.num_skipped_steps += 1
        return False
