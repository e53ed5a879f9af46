"""A plan being written."""

from __future__ import annotations

import math
from typing import Final

from paceline.core.outputs import BlockCopy, NewRequest, ScheduledRow
from paceline.core.pacing.budget import Allowance
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request
from paceline.core.tier import Tier

__all__ = ["TILE", "Draft"]

# a NamedTuple made by tuple's constructor costs half of one made by its own, and there is one for
# every token of every request
_new = tuple.__new__
# a best-effort request that was passed over in so many steps gets a row, late or not
_MAX_SKIPPED_STEPS: Final = 8
# the same for those who save up for their rows: prompts in every step leave them no room for what
# they have saved
_MAX_SAVING_STEPS: Final = 64
# tokens of such rows in one step at most
_CHARITY: Final = 16
# tokens; chunks of best-effort requests are multiples of it
TILE: Final = 16


class Draft:
    """Rows so far and what is left to hand out."""

    __slots__ = (
        "_predicted",
        "_predicted_at",
        "background_cost",
        "background_seconds",
        "best_effort_cost",
        "budget",
        "charity",
        "copies",
        "forked",
        "narrow",
        "narrow_keys",
        "narrow_rows",
        "new",
        "num_tokens",
        "requests",
        "rows",
        "seconds",
        "wide",
        "wide_keys",
        "wide_tokens",
    )

    def __init__(self, allowance: Allowance) -> None:
        # tokens left to hand out
        self.budget = allowance.tokens
        # predicted seconds beyond which best-effort rows stay out
        self.seconds = allowance.seconds
        # the same for those that nobody waits for
        self.background_seconds = allowance.background
        # seconds by which these have lengthened it
        self.background_cost = 0.0
        # the same of best effort that was let in or is in a hurry
        self.best_effort_cost = 0.0
        # tokens that best-effort requests may still get although there is no room for them
        self.charity = _CHARITY
        # predicted seconds, as of so many rows
        self._predicted = 0.0
        self._predicted_at = -1
        # which rows this step takes; both where the policy mixes
        self.narrow = self.wide = True
        # what ``shape`` is made of
        self.wide_tokens = self.narrow_rows = self.narrow_keys = 0
        self.wide_keys = 0.0
        self.num_tokens = 0
        self.rows: list[ScheduledRow] = []
        self.requests: list[Request] = []
        self.new: list[NewRequest] = []
        self.copies: list[BlockCopy] = []
        # forks that got their blocks in this step: copies come before writes, so they may run
        # from the next step on
        self.forked: list[Request] = []

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
        """Count rows of one token that the planner added by itself, with the tokens before them."""
        self.budget -= num_rows
        self.num_tokens += num_rows
        self.narrow_rows += num_rows
        self.narrow_keys += num_keys

    def limit(self, request: Request) -> float:
        """Predicted seconds of the step beyond which a best-effort request stays out."""
        if self.background_seconds < self.seconds and request.tier is Tier.BACKGROUND:
            return self.background_seconds
        return self.seconds

    def has_room(
        self, request: Request, num_tokens: int, model: StepTimeModel, most: float = math.inf
    ) -> bool:
        """Whether the step stays short enough for the others, and within ``most`` seconds, with the
        first so many tokens of a best-effort request too."""
        limit = min(most, self.limit(request))
        return (
            limit == math.inf
            or not self.rows
            or model.predict(self.shape.plus(0, num_tokens)) <= limit
        )

    def fitting(self, request: Request, model: StepTimeModel, most: float = math.inf) -> int:
        """Tokens of the largest chunk of a best-effort request for which there is room within
        ``most`` seconds: a multiple of the tile, and one at least."""
        limit, start = min(most, self.limit(request)), request.num_computed_tokens
        if limit == math.inf:
            return max(1, self.budget)
        low, high = 1, max(1, self.budget // TILE)
        while low < high:
            middle = (low + high + 1) // 2
            if model.predict(self.shape.plus(start, middle * TILE)) <= limit:
                low = middle
            else:
                high = middle - 1
        return low * TILE

    def spares(self, request: Request, model: StepTimeModel) -> bool:
        """Whether a best-effort request that runs gets a row: if there is room, or if it was passed
        over long enough and not too many others have been given one for that reason."""
        limit = self.limit(request)
        if limit == math.inf or not self.rows:
            request.num_skipped_steps = 0
            return True
        if self._predicted_at != len(self.rows):
            self._predicted_at = len(self.rows)
            self._predicted = model.predict(self.shape)
        wanted = self._predicted + model.row_seconds(request.num_computed_tokens)
        if wanted <= limit:
            # the next one asks once this one has its row
            self._predicted = wanted
            self._predicted_at += 1
            request.num_skipped_steps = 0
            return True
        request.num_skipped_steps += 1
        saves = request.tier is Tier.BACKGROUND and self.background_seconds < math.inf
        patience = _MAX_SAVING_STEPS if saves else _MAX_SKIPPED_STEPS
        wide = request.num_uncomputed_tokens > 1
        cost = TILE if wide else 1
        if request.num_skipped_steps <= patience or cost > self.charity:
            return False
        self.charity -= cost
        request.num_skipped_steps = 0
        return True
