"""Rules that find the request which ended an engine.

::

    an engine ends
      not in its last steps         no suspect: goes to the next engine at once
      in them, elsewhere than at    suspect of level 1
        an earlier end
      in them, where it had been    one level more
        at an earlier end

    the next engine
      without a token so far        one at a time, each until its first token
      with tokens, level 1          all at once, after those
      with tokens, level 2 or more  one at a time, each until it is past where it was

A request that ends an engine does so at the same position every time; others are elsewhere by then.
So the one on trial is guilty if the engine ends at that position and no other is as suspect;
requests that ran at the same time are not. An innocent request loses a bounded time.

This module does not know engines.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Place", "Quarantine", "Suspect", "find_guilty"]

# tokens by which the same position may differ, as the latest tokens of a lost engine are lost too
_SLACK: Final = 4
_TRIED_FIRST, _TOGETHER, _TRIED_LAST = range(3)


@dataclass(slots=True, eq=False)
class Suspect:
    """Evidence against one request."""

    # engines that ended in a row with the request at one position; 0: none ended in its steps
    level: int = 0
    # output tokens delivered by then
    point: int = 0
    # the request has its turn and is not past its point yet
    on_trial: bool = False

    def is_past(self, tokens: int) -> bool:
        """Whether an engine has survived the position."""
        return tokens > (self.point + _SLACK if self.point else 0)

    def level_at(self, tokens: int) -> int:
        """Return the level after one more engine ended, here."""
        if self.level and (self.point > 0) == (tokens > 0) and abs(tokens - self.point) <= _SLACK:
            return self.level + 1
        return 1

    @property
    def rank(self) -> int:
        if not self.point:
            return _TRIED_FIRST
        return _TOGETHER if self.level < 2 else _TRIED_LAST


def find_guilty(started: Sequence[tuple[Suspect, int]]) -> Suspect | None:
    """Return the request that ended an engine; None if unknown, and then all are more suspect.

    Args:
        started: requests in its last steps, with the output tokens delivered.
    """
    levels = [suspect.level_at(tokens) for suspect, tokens in started]
    tried = [
        (level, suspect)
        for level, (suspect, _) in zip(levels, started, strict=True)
        if suspect.on_trial and level > 1
    ]
    if tried:
        most, top = max(tried, key=lambda entry: entry[0])
        for level, (suspect, tokens) in zip(levels, started, strict=True):
            # a first token that was never tried is as likely a cause, but not twice
            fresh = most == 2 and not top.point and not suspect.level and not tokens
            if suspect is not top and (level >= most or fresh):
                break
        else:
            return top
    for level, (suspect, tokens) in zip(levels, started, strict=True):
        suspect.level, suspect.point = level, tokens
    return None


@dataclass(slots=True, order=True)
class Place:
    """A slot in the queue of the quarantine, or at its head."""

    order: tuple[int, bool, int, int]
    # done once the request may go
    turn: asyncio.Future[None] = field(compare=False)

    @property
    def alone(self) -> bool:
        """Whether no other suspect gets a turn meanwhile."""
        return self.order[0] != _TOGETHER

    async def has_turn(self, timeout: float) -> bool:
        """Wait for the turn; return False if that takes more than ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self.turn
        except TimeoutError:
            return False
        return True


class Quarantine:
    """Hands out turns, one at a time if that matters. Used on one event loop.

    A request that called ``join`` waits for its ``turn``, and calls ``leave`` in any case.
    """

    def __init__(self) -> None:
        self._queue: list[Place] = []
        self._holder: Place | None = None
        self._joined = 0
        self._open = False

    def join(self, suspect: Suspect, *, last: bool = False, priority: int = 0) -> Place:
        """Add a slot among those of its rank; ``last``: after those that are not ``last``.

        ``priority``: lower is sooner.
        """
        self._joined += 1
        order = (suspect.rank, last, priority, self._joined)
        place = Place(order, asyncio.get_running_loop().create_future())
        heapq.heappush(self._queue, place)
        self._advance()
        return place

    def leave(self, place: Place) -> None:
        """Give up the turn, or stop waiting for it. Idempotent."""
        if place is self._holder:
            self._holder = None
        elif not place.turn.done():
            place.turn.cancel()
        self._advance()

    def open(self) -> None:
        """Begin turns, by rank, as there is an engine."""
        self._open = True
        self._advance()

    def close(self) -> None:
        """Stop turns, as there is no engine."""
        self._open = False

    def _advance(self) -> None:
        while self._open and self._holder is None and self._queue:
            place = heapq.heappop(self._queue)
            if place.turn.done():
                # its request left the queue
                continue
            if place.alone:
                self._holder = place
            place.turn.set_result(None)
