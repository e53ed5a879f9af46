"""Number of prompt tokens in a step that is best for throughput, whatever the targets.

* *The knee*: chunks are no larger than it takes for the fixed part of a step's time to be a small
  share. A larger step computes hardly more tokens a second, and all wait longer for its end.
* *What is free*: where a step takes as long as reading the weights (``memory_bound``), the chunk
  next to running rows is as large as hides behind that.

This module does not know targets, the queue, memory or the clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request

__all__ = ["LATE_QUANTILE", "ChunkSize"]

# tokens of a step before anything was measured
_UNTRAINED: Final = 512
# one in this many chunks that hide behind rows is twice as large, and one half as large
_AROUND: Final = 24
# chunks are multiples of it, where the matrix kernels are efficient
_TILE: Final = 32
# quantile of actual / predicted time: steps are late once in ten
LATE_QUANTILE: Final = 0.9
# observations between two searches for the knee
_REFIT: Final = 16


class ChunkSize:
    """Sizes in tokens; shared by all parts that limit steps, as it counts its tries.

    Args:
        most: ``max_num_batched_tokens``.
        adaptive: False: always ``most``.
        floor: size of a chunk that is allowed however late running requests are.
        overhead: share of the fixed part in the time of the largest step.
        gap: longest time, s, of a step while answers are streamed.
    """

    def __init__(
        self,
        model: StepTimeModel,
        most: int,
        *,
        adaptive: bool = True,
        floor: int = 32,
        overhead: float = 0.02,
        gap: float = math.inf,
    ) -> None:
        self._model, self._most, self._adaptive = model, most, adaptive
        self.tile, self.floor, self.gap = _TILE, floor, gap
        self._overhead = overhead
        # where other engines use the same processors (``Scheduler.share``): seconds that they take
        # between two steps, and the longest step of prompts
        self.away_s, self.longest_s = 0.0, math.inf
        self._tiles, self._known_at = 1, -1
        # chunks that were sized to hide behind the rows next to them
        self._num_hidden = 0

    def plain_tokens(self, running: Sequence[Request]) -> int:
        """Return the tokens of a step in which no request has targets."""
        if not self._adaptive:
            return self._most
        num_running, bounded = len(running), self.gap < math.inf
        if self._model.ready and not bounded and not self._model.free_tokens:
            return min(self._most, num_running + max(self.knee(), self.floor))
        rows = [r.num_computed_tokens for r in running if r.num_uncomputed_tokens <= 1]
        if not self._model.ready:
            return self.untrained(num_running, careful=bounded and bool(rows))
        chunk = self.unpaced(num_running, len(rows))
        if bounded and rows:
            start = max(request.num_computed_tokens for request in running)
            base = StepShape(0, 0.0, len(rows), sum(rows))
            chunk = min(chunk, self.within(base, start, self._most, gap=self.gap))
        return self.total(chunk, num_running)

    def untrained(self, num_running: int, *, careful: bool) -> int:
        """Return the tokens of a step whose time is not known yet: few if gaps are limited."""
        most = 0 if careful else _UNTRAINED
        return min(self._most, max(most, num_running + self.floor))

    def total(self, chunk: int, num_running: int) -> int:
        """Return the tokens of a step with a chunk of prompt and one token per running request."""
        return min(self._most, num_running + max(chunk, self.floor))

    def unpaced(self, num_running: int, num_narrow: int) -> int:
        """Return the chunk next to rows without targets; now and then other sizes are tried."""
        chunk = self.beside(num_running, num_narrow)
        if not self._model.free_tokens or not num_narrow:
            return chunk
        self._num_hidden += 1
        turn = self._num_hidden % _AROUND
        if turn == 0:
            chunk *= 2
        elif turn == _AROUND // 2:
            chunk //= 2
        return min(self.knee(), chunk)

    def beside(self, num_running: int, num_narrow: int) -> int:
        """Return the tokens that hide behind the time of the rows next to them, else the knee."""
        knee, free = self.knee(), self._model.free_tokens
        if not free or not num_narrow:
            return knee
        return min(knee, max(self.floor, free - num_running))

    def knee(self) -> int:
        """Return the smallest chunk of prompt whose fixed part is a small share of its time."""
        if self._known_at != self._model.num_observations // _REFIT:
            self._known_at = self._model.num_observations // _REFIT
            fixed, each = self.tile_seconds()
            # fixed <= overhead * (fixed + each * tiles)
            most = max(1, self._most // self.tile)
            wanted = fixed * (1.0 / self._overhead - 1.0)
            self._tiles = max(1, math.ceil(wanted / each)) if wanted < each * most else most
        knee = min(self._most, self._tiles * self.tile)
        if self.longest_s == math.inf:
            return knee
        return max(self.floor, self.within(StepShape(), 0, knee, seconds=self.longest_s))

    def tile_seconds(self) -> tuple[float, float]:
        """Return a prompt step's fixed seconds, and its seconds per tile."""
        one, two = (self._model.predict(StepShape().plus(0, n * self.tile)) for n in (1, 2))
        return max(0.0, one - (two - one)), two - one

    def within(
        self,
        base: StepShape,
        start: int,
        most: int,
        *,
        seconds: float = math.inf,
        gap: float = math.inf,
    ) -> int:
        """Return the tokens of the largest chunk from position ``start`` on, up to ``most``, with
        which a step of shape ``base`` is predicted to take at most ``seconds``. With a ``gap``, its
        rows wait no longer nine times in ten, and it has at most twice the tokens ever measured."""
        if gap < math.inf:
            most = min(most, max(self.floor, 2 * self._model.most_wide_tokens))
            seconds = min(seconds, gap / max(1.0, self._model.quantile(LATE_QUANTILE)))
        predict, tile = self._model.predict, self.tile
        sizes = range(tile, most + 1, tile)
        return tile * bisect_right(sizes, seconds, key=lambda n: predict(base.plus(start, n)))
