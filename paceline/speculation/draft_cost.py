"""What drafts cost, learned from steps: rows, the draft model's passes, and waiting for tokens.

``Tries`` says when to verify a draft that is predicted not to pay, so that its cost stays known.

This module does not know steps, requests or where draft tokens come from.
"""

from __future__ import annotations

from typing import Final

from paceline.core.outputs import StepResult
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.speculation.row_price import RowPrice

__all__ = ["MANY", "DraftCosts", "Tries"]

# exploration: every ``_TRY`` steps a likely draft is verified even if it is predicted not to pay,
# so that its price stays known; a try that did not pay doubles the interval, up to ``_MOST_TRY``,
# until a draft pays or another request comes
_TRY: Final = 32
_MOST_TRY: Final = 512
# steps with drafts until their price counts as known: with rows of one request alone, it cannot be
# separated from the fixed part of a step
_UNPRICED: Final = 16
# weight of the newest value in means, and of the result of a try
_NEWEST: Final = 0.1
_TRIED: Final = 0.5
# factor on the mean pipeline bubble after a step that did not wait
_FORGETTING: Final = 0.99
# known tokens read by the draft model in one step from which its time shows their price
MANY: Final = 32


class Tries:
    """The schedule of tries of one scheduler."""

    def __init__(self) -> None:
        self._num_steps = 0
        # step from which a draft is to be tried, and the steps until the next try
        self._at = self._every = _TRY
        # the last drafts were a try
        self.tried = False

    def begin_step(self) -> bool:
        """Count a step that might get drafts; return whether one is to be tried."""
        self._num_steps += 1
        return self._num_steps >= self._at

    def on_request(self) -> None:
        """Try soon: another request gets drafts."""
        self._every = _TRY
        self._at = min(self._at, self._num_steps + _TRY)

    def note(self, tried: bool) -> None:
        """Store whether a try was needed for the step's drafts."""
        self.tried = tried

    def end_step(self) -> None:
        """Choose the next try if the step, which got drafts, was due for one."""
        if self._num_steps >= self._at:
            self._every = min(_MOST_TRY, 2 * self._every) if self.tried else _TRY
            self._at = self._num_steps + self._every


class DraftCosts:
    """Costs in seconds; each is 0 while nothing is known."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time, self._row_price = step_time, RowPrice()
        self._num_lengthened = 0
        # mean pipeline bubble: tokens received -> plan made with them; time of the last tokens
        self.bubble = self._received_at = 0.0
        # the draft model's pass over all rows, and each known token that it reads
        self.pass_seconds = self.token_seconds = 0.0
        # most known tokens that it read in a step
        self._most_taken = 0
        # most known tokens of a request that it reads, as a head sees no more; 0: not known
        self._most_seen = 0

    @property
    def known(self) -> bool:
        """Whether enough steps had drafts to rely on these costs."""
        return self._step_time.ready and self._num_lengthened >= _UNPRICED

    def step_seconds(self, num_rows: int) -> tuple[float, float]:
        """Return the seconds of a step of ``num_rows`` rows, and of one row more."""
        found, model = self._row_price.of(num_rows), self._step_time
        if found is not None or not model.ready:
            return found or (0.0, 0.0)
        return model.predict(StepShape(narrow_rows=num_rows)), model.row_seconds(0)

    def unseen(self, num_unseen: int) -> int:
        """Return how many known tokens the draft model is expected to read, of those it has not."""
        return min(num_unseen, self._most_seen or num_unseen)

    def making(self, passes: int, unseen: int) -> float:
        """Return the draft model's seconds for passes after it read ``unseen`` known tokens."""
        return passes * self.pass_seconds + min(unseen, self._most_taken) * self.token_seconds

    def note_plan(self, now: float, num_rows: int, *, waited: bool) -> None:
        """Update the mean bubble from a plan that ``waited`` for tokens; without a wait it decays,
        so that waiting is tried again."""
        if not waited:
            self.bubble *= _FORGETTING
            return
        seconds, step = now - self._received_at, self.step_seconds(num_rows)[0]
        # longer than two steps: there was no request
        if seconds < 2 * step:
            self.bubble += _NEWEST * (seconds - self.bubble)

    def note_result(self, now: float, num_rows: int, seconds: float) -> None:
        """Note that a step's tokens were received; it took ``seconds`` for rows of one token, draft
        tokens counted as such. 0: it had others."""
        self._received_at = now
        if seconds > 0.0:
            self._row_price.observe(num_rows, seconds)

    def note_skipped(self, num_tokens: int, num_read: int) -> None:
        """Learn that the draft model reads no more than the last ``num_read`` known tokens, if it
        skipped ``num_tokens``."""
        if num_tokens >= MANY:
            self._most_seen = max(self._most_seen, num_read)

    def note_drafted(self, result: StepResult, *, verified: bool, tried: bool) -> None:
        """Learn from the result of a step with drafts what the draft model's passes and known
        tokens took."""
        self._num_lengthened += bool(verified or result.made)
        if not result.made:
            return
        passes = max(len(token_ids) for _, token_ids in result.made)
        taken, seconds = sum(result.caught_up), result.drafting
        self._most_taken = max(self._most_taken, taken)
        if taken < MANY:
            share = _TRIED if tried else _NEWEST
            self.pass_seconds = _mean(self.pass_seconds, seconds / max(1, passes), share)
        elif self.pass_seconds or not passes:
            rest = max(0.0, seconds - passes * self.pass_seconds)
            self.token_seconds = _mean(self.token_seconds, rest / taken, _NEWEST)


def _mean(mean: float, newest: float, share: float) -> float:
    """Return the updated recent mean; 0 before the first value."""
    return mean + (share if mean else 1.0) * (newest - mean)
