"""Whose fault it is that an engine ended, and how to find out.

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

What ends an engine does so at the same place every time; the others are elsewhere by then. So the
one on trial is guilty if the engine ends at that place and nobody else is as suspect; whoever ran
beside it is not suspected for that. An innocent request loses time, of which there is a bound.

This module does not know engines.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Place", "Quarantine", "Suspect", "find_guilty"]

# tokens by which the same place may differ: an engine that ends takes its latest news along
_SLACK: Final = 4
_TRIED_FIRST, _TOGETHER, _TRIED_LAST = range(3)


@dataclass(slots=True, eq=False)
class Suspect:
    """What is known against one request."""

    # engines that ended in a row with the request at one place; 0: none ended in its steps
    level: int = 0
    # output tokens that were out then
    point: int = 0
    # it has got a turn and is not past its point yet
    on_trial: bool = False

    def is_past(self, tokens: int) -> bool:
        """Whether an engine has survived the place."""
        return tokens > (self.point + _SLACK if self.point else 0)

    def level_at(self, tokens: int) -> int:
        """The level after an engine ended here too."""
        if self.level and (self.point > 0) == (tokens > 0) and abs(tokens - self.point) <= _SLACK:
            return self.level + 1
        return 1

    @property
    def rank(self) -> int:
        if not self.point:
            return _TRIED_FIRST
        return _TOGETHER if self.level < 2 else _TRIED_LAST


def find_guilty(started: Sequence[tuple[Suspect, int]]) -> Suspect | None:
    """Who ended an engine; None where that cannot be told, and then all are more suspect.

    Args:
        started: who was in its last steps, with the output tokens that are out.
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
            # a first token that was never tried could be it just as well, but not twice
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
    """In the queue of the quarantine, or at its head."""

    order: tuple[int, bool, int, int]
    # done once it may go
    turn: asyncio.Future[None] = field(compare=False)

    @property
    def alone(self) -> bool:
        """Nobody else gets a turn meanwhile."""
        return self.order[0] != _TOGETHER

    async def has_turn(self, timeout: float) -> bool:
        """Waits for its turn; False: that takes more than ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self.turn
        except TimeoutError:
            return False
        return True


class Quarantine:
    """Hands out turns, to one at a time where that matters. Used on one event loop.

    Whoever ``join``ed waits for its ``turn``, and ``leave``s in any case.
    """

    def __init__(self) -> None:
        self._queue: list[Place] = []
        self._holder: Place | None = None
        self._joined = 0
        self._open = False

    def join(self, suspect: Suspect, *, last: bool = False, priority: int = 0) -> Place:
        """A place among the others of its rank; ``last``: behind those who are not.

        ``priority``: lower is sooner.
        """
        self._joined += 1
        order = (suspect.rank, last, priority, self._joined)
        place = Place(order, asyncio.get_running_loop().create_future())
        heapq.heappush(self._queue, place)
        self._advance()
        return place

    def leave(self, place: Place) -> None:
        """Its turn is over, or it does not wait for it any more. Idempotent."""
        if place is self._holder:
            self._holder = None
        elif not place.turn.done():
            place.turn.cancel()
        self._advance()

    def open(self) -> None:
        """There is an engine: turns begin, by rank."""
        self._open = True
        self._advance()

    def close(self) -> None:
        """There is none."""
        self._open = False

    def _advance(self) -> None:
        while self._open and self._holder is None and self._queue:
            place = heapq.heappop(self._queue)
            if place.turn.done():
                # it left
                continue
            if place.alone:
                self._holder = place
            place.turn.set_result(None)
