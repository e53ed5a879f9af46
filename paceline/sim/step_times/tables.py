"""Interpolation in measured tables: piecewise linear, extended by the outermost slopes.

This module does not know models or steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.errors import ConfigError

__all__ = ["AttentionTable", "Bracket", "Curve", "bracket"]


class Bracket(NamedTuple):
    """Position of a value between grid points ``low`` and ``low + 1``; ``weight`` belongs to the
    upper one and is outside [0, 1] beyond the grid."""

    low: int
    weight: float


def bracket(grid: Sequence[float], value: float) -> Bracket:
    """Return the grid cell of ``value``; the outermost cell for values beyond the grid."""
    if len(grid) == 1:
        return Bracket(0, 0.0)
    low = min(max(bisect_right(grid, value) - 1, 0), len(grid) - 2)
    return Bracket(low, (value - grid[low]) / (grid[low + 1] - grid[low]))


class Curve:
    """y over x, x strictly ascending. Never below the smallest measured value."""

    __slots__ = ("_floor", "x", "y")

    def __init__(self, points: Mapping[float, float]) -> None:
        if not points:
            raise ConfigError("a profile table has no rows for something that is asked of it")
        self.x = sorted(points)
        self.y = [points[x] for x in self.x]
        self._floor = min(self.y)

    def __call__(self, value: float) -> float:
        low, weight = bracket(self.x, value)
        if weight == 0.0:
            return self.y[low]
        first = self.y[low]
        return max(self._floor, first + weight * (self.y[low + 1] - first))


class _Slice:
    """All measurements of one chunk and one history: a curve over decode keys for each number of
    decoding rows, and the time without any."""

    __slots__ = ("alone", "counts", "curves")

    def __init__(self, rows: Iterable[tuple[int, int, float]]) -> None:
        by_count: dict[int, dict[float, float]] = {}
        # microseconds of the chunk without decoding rows; None: not measured
        self.alone: float | None = None
        for count, keys, value in rows:
            if count == 0:
                self.alone = value
            else:
                by_count.setdefault(count, {})[keys] = value
        self.counts = sorted(by_count)
        self.curves = [Curve(by_count[count]) for count in self.counts]

    def at(self, count: int, keys: Sequence[float]) -> tuple[float, ...]:
        """Return the time with ``count`` decoding rows of N keys each, for every N in ``keys``."""
        if count == 0 or not self.counts:
            return (self.alone or 0.0,) * len(keys)
        low, weight = bracket(self.counts, count)
        if weight < 0.0:
            # fewer rows than were ever measured: interpolate towards the chunk alone
            weight, low = 0.0, 0
        if weight == 0.0:
            curve = self.curves[low]
            return tuple([curve(k) for k in keys])
        first, second = self.curves[low], self.curves[low + 1]
        return tuple([(1.0 - weight) * first(k) + weight * second(k) for k in keys])


class AttentionTable:
    """One layer's attention over (chunk, history, decoding rows, their keys), in the table's unit.

    Grids need not be a full product: some chunks may have been measured with long histories and
    many keys only. Those are left out for questions below the range that they cover.

    Args:
        rows: (prefill_chunk, kv_prefill, n_decode, kv_decode, time).
    """

    def __init__(self, rows: Iterable[tuple[int, int, int, int, float]]) -> None:
        grouped: dict[int, dict[int, list[tuple[int, int, float]]]] = {}
        least_keys: dict[int, int] = {}
        for chunk, history, count, keys, value in rows:
            grouped.setdefault(chunk, {}).setdefault(history, []).append((count, keys, value))
            if count:
                least_keys[chunk] = min(keys, least_keys.get(chunk, keys))
        if not grouped:
            raise ConfigError("the attention table is empty")
        self._slices = {
            chunk: {history: _Slice(found) for history, found in histories.items()}
            for chunk, histories in grouped.items()
        }
        self._histories = {chunk: sorted(histories) for chunk, histories in self._slices.items()}
        # some histories may have been measured without decoding rows only
        self._mixed_histories = {
            chunk: [h for h in self._histories[chunk] if self._slices[chunk][h].counts]
            or self._histories[chunk]
            for chunk in self._slices
        }
        overall = min(least_keys.values(), default=0)
        chunks = sorted(chunk for chunk in self._slices if chunk > 0)
        self._chunks = chunks
        # chunks whose measurements begin at the fewest keys
        self._low_chunks = [c for c in chunks if least_keys.get(c, overall) <= overall] or chunks
        self._low_keys = max((least_keys.get(c, 0) for c in chunks), default=0)

    def at(
        self, chunk: int, history: float, count: int, keys: Sequence[float]
    ) -> tuple[float, ...]:
        """Return the time of one layer's attention, for every entry of ``keys``.

        Args:
            chunk: prompt tokens computed in the step; 0: none.
            history: keys before the chunk. Below 0 for several prompts that together have fewer
                keys than one chunk of their length.
            count: number of rows of one token.
            keys: number of keys that each of these rows attends to.
        """
        if chunk == 0 and 0 in self._slices:
            return self._slices[0][0].at(count, keys)
        chunks = self._low_chunks if count and min(keys) < self._low_keys else self._chunks
        low, weight = bracket(chunks, chunk)
        weight = max(0.0, weight)
        first = self._of_chunk(chunks[low], history, count, keys)
        if weight == 0.0:
            return first
        second = self._of_chunk(chunks[low + 1], history, count, keys)
        return tuple([(1.0 - weight) * a + weight * b for a, b in zip(first, second, strict=True)])

    def _of_chunk(
        self, chunk: int, history: float, count: int, keys: Sequence[float]
    ) -> tuple[float, ...]:
        histories = (self._mixed_histories if count else self._histories)[chunk]
        slices = self._slices[chunk]
        if history < 0.0:
            # several prompts that cost less than one long one. The first cells of the grid differ
            # by less than their measurement noise, so the slope is taken over a history as long as
            # the chunk
            base = histories[0]
            far = next((h for h in histories if h >= chunk), histories[-1])
            first = slices[base].at(count, keys)
            if far == base:
                return first
            second = slices[far].at(count, keys)
            weight = history / (far - base)
            # at least half of it
            return tuple(
                [
                    max(0.5 * a, a + weight * max(0.0, b - a))
                    for a, b in zip(first, second, strict=True)
                ]
            )
        low, weight = bracket(histories, history)
        first = slices[histories[low]].at(count, keys)
        if weight == 0.0:
            return first
        second = slices[histories[low + 1]].at(count, keys)
        return tuple([(1.0 - weight) * a + weight * b for a, b in zip(first, second, strict=True)])
