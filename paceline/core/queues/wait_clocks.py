"""Why requests wait: seconds by reason, for all of them at the cost of one.

At every step the scheduler notes why the head of the queue is blocked. That blocks all requests
behind it too, so a request's own wait is the difference of two readings of one set of clocks.

This module does not know what the reasons mean to the scheduler.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from operator import sub
from typing import Final

__all__ = ["REASONS", "Reason", "WaitClocks"]


class Reason(enum.IntEnum):
    """Reasons for a request's wait; the lower-case names are the labels of metrics."""

    # the running step when it arrived: plans are made between steps
    STEP = 0
    # other requests got the tokens of the step
    BUDGET = 1
    # max_num_seqs requests run
    SLOTS = 2
    # not enough KV blocks, now or as predicted
    MEMORY = 3
    # one more would make the running requests' tokens late
    PACE = 4
    # the policy holds arrivals back, or keeps capacity for another request
    POLICY = 5
    # the memory-pressure valve is open
    PRESSURE = 6
    # its adapter was not in memory, before it was queued
    ADAPTER = 7


REASONS: Final = tuple(reason.name.lower() for reason in Reason)


class WaitClocks:
    """One clock per reason, of which one runs at a time; ``now`` must not go backwards."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(REASONS)
        self._reason: Reason | None = None
        self._since = 0.0

    def run(self, now: float) -> None:
        """Advance the clock of the reason noted last up to ``now``."""
        if self._reason is not None:
            self._seconds[self._reason] += max(0.0, now - self._since)
        self._since = now

    def note(self, reason: Reason | None, now: float) -> None:
        """Set the reason that blocks the queue from ``now`` on; None: no request waits."""
        self.run(now)
        self._reason = reason

    def stop(self) -> None:
        """Stop: no request waits any more, since some time after the last ``note``."""
        self._reason = None

    def reading(self) -> tuple[float, ...]:
        """Return the seconds by reason up to the last ``run`` or ``note``."""
        return tuple(self._seconds)

    def since(self, reading: Sequence[float], waited: float) -> list[float]:
        """Return a wait of ``waited`` seconds that began after ``reading``, by reason."""
        spent = list(map(sub, self._seconds, reading))
        covered = sum(spent)
        if covered > waited:
            # the clock that was running had started before the wait began
            scale = waited / covered
            return [seconds * scale for seconds in spent]
        # no clock covers the time before the first plan
        spent[Reason.STEP] += waited - covered
        return spent
