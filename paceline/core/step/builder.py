"""A step being built: its rows so far, and what is left to hand out."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.outputs import BlockCopy, NewRequest, ScheduledRow
from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request

__all__ = ["StepBuilder"]

# a NamedTuple made by tuple's constructor costs half of one made by its own, and there is one for
# every token of every request
_new = tuple.__new__


@dataclass(slots=True, eq=False)
class StepBuilder:
    """Made anew for each step; ``limits.Step`` is one that knows what it may do."""

    # tokens left to hand out
    budget: int
    # which rows this step takes; both where the policy mixes
    narrow: bool = True
    wide: bool = True
    # what ``shape`` is made of
    wide_tokens: int = 0
    wide_keys: float = 0.0
    narrow_rows: int = 0
    narrow_keys: int = 0
    num_tokens: int = 0
    # the rows, and whose they are
    rows: list[ScheduledRow] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    # forks that got their blocks in this step: copies come before writes, so they may run from the
    # next step on
    forked: list[Request] = field(default_factory=list)

    @property
    def shape(self) -> StepShape:
        """Of the rows so far."""
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
        self.num_tokens += num_tokens
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
        self.num_tokens += num_rows
        self.narrow_rows += num_rows
        self.narrow_keys += num_keys
