"""Number of replicas for a load: more at once, fewer slowly. Pure: times are arguments.

The load is counted in requests, and so is what a replica takes: its slots, or fewer where memory
or the predicted wait for a first token is used up earlier. Requests come and go at random, so
their number scatters by about its square root, however many replicas share them. A pool of room
for ``mean + 1.25 * sqrt(mean)`` requests therefore has a free slot for most of them at any size,
where a fixed share of free slots is too little for a small pool and too much for a large one (the
square-root staffing rule of Halfin and Whitt, 1981).

The mean is that of some minutes, so that it does not follow the scatter itself; a moment at which
more than all slots are asked for adds replicas at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["Scale", "Scaling", "replicas_for"]

# standard deviations of the number of requests for which there are free slots
_MARGIN: Final = 1.25
# share of memory, and of the wait that counts as full, which are left for what grows
_FULL: Final = 0.9
# most that a replica's predicted wait counts for
_MOST_WAIT: Final = 2.0
# multiple of all slots from which replicas are added at once: a few requests that wait for a second
# are cheaper than a replica
_CROWDED: Final = 1.1
# seconds of the mean; and between two looks at the load
_WINDOW: Final = 300.0
_LOOK: Final = 1.0
# seconds from a change until a replica is given up
_SHRINK_SECONDS: Final = 60.0


class Loaded(Protocol):
    """What is seen of a replica's load; None: not known."""

    @property
    def requests(self) -> int | None: ...

    # predicted seconds of waiting for a first token
    @property
    def wait(self) -> float | None: ...

    # share of its KV cache in use, and requests that it runs at once at most
    @property
    def kv(self) -> float | None: ...

    @property
    def slots(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Scale:
    """Bounds of a pool that grows and shrinks with its load, and the predicted seconds of waiting
    for a first token at which a replica counts as full."""

    min: int
    max: int
    first_token: float = 1.0


def replicas_for(requests: float, room: float) -> int:
    """Return the replicas for ``requests`` on average, with ``room`` for so many at each."""
    return math.ceil((requests + _MARGIN * math.sqrt(requests)) / room - 1e-9)


class Scaling:
    """Number of replicas of one pool."""

    def __init__(self) -> None:
        # (time, requests, replicas that these fill), and the sums
        self._looks: deque[tuple[float, float, float]] = deque()
        self._requests = self._filled = 0.0
        # until when no replica is given up; None: nothing is known of the time before, so a window
        # passes first
        self._keeps_until: float | None = None

    def wanted(self, now: float, scale: Scale, serving: Sequence[Loaded], before: int) -> int:
        """Return the replicas that the pool shall have; ``before``: had so far."""
        before = min(scale.max, max(scale.min, before))
        counts = [each.requests for each in serving if each.requests is not None]
        if not counts or len(counts) < len(serving):
            # a gateway does not answer, or has not taken in the last change
            return before
        if self._keeps_until is None:
            self._keeps_until = now + _WINDOW
        filled = sum(_filled(each, scale) for each in serving)
        requests = float(sum(counts))
        if not self._looks or now - self._looks[-1][0] >= _LOOK:
            self._add(now, requests, filled)
        mean = self._requests / len(self._looks)
        # requests that fill one replica
        room = self._requests / self._filled if self._requests and self._filled else math.inf
        steady = replicas_for(mean, room)
        need = min(
            scale.max, max(scale.min, steady, math.ceil(requests / (_CROWDED * room) - 1e-9))
        )
        if need > before:
            self._keeps_until = now + _SHRINK_SECONDS
            return need
        if need < before and now >= self._keeps_until:
            self._keeps_until = now + _SHRINK_SECONDS
            return before - 1
        return before

    def _add(self, now: float, requests: float, filled: float) -> None:
        self._looks.append((now, requests, filled))
        self._requests += requests
        self._filled += filled
        while now - self._looks[0][0] > _WINDOW:
            _, old, old_filled = self._looks.popleft()
            self._requests -= old
            self._filled -= old_filled


def _filled(seen: Loaded, scale: Scale) -> float:
    """Return how full a replica is: its slots, its memory, or the wait for a first token."""
    slots = (seen.requests or 0) / seen.slots if seen.slots else 0.0
    wait = min(_MOST_WAIT, (seen.wait or 0.0) / scale.first_token)
    return max(slots, (seen.kv or 0.0) / _FULL, wait / _FULL)
