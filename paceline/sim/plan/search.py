"""Searches over runs: the smallest fleet that meets a target, and the highest rate that does.

A run is a function from a size to its summary; the caller decides what is simulated. Both searches
assume that more replicas, or a lower rate, never make attainment worse, which holds up to noise:
equal seeds for all runs keep that small. This module does not know the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.sim.report.metrics import Summary

__all__ = ["Found", "Target", "highest_rate", "smallest_fleet"]


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a run. The targets of each request come with the workload."""

    # share of requests within all their targets
    attainment: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"attainment must be in (0, 1], got {self.attainment:g}")

    def met(self, run: Summary) -> bool:
        """Whether a run with at least one request meets the target."""
        return run.requests > 0 and run.attainment >= self.attainment


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search, and every run that it took."""

    # replicas, or requests per second; None: even the largest size, or lowest rate, fails
    size: float | None
    # the run at ``size``; where that is None, the best run
    best: Summary
    # (size, attainment) in the order of the runs
    tried: tuple[tuple[float, float], ...]


def smallest_fleet(run: Callable[[int], Summary], target: Target, *, most: int = 64) -> Found:
    """Return the fewest replicas that meet ``target``: doubled until it is met, then bisected.

    Runs about 2 log2(answer) sizes, each once.
    """
    if most < 1:
        raise ConfigError(f"at least 1 replica must be allowed, got {most}")
    seen: dict[int, Summary] = {}

    def meets(size: int) -> bool:
        if size not in seen:
            seen[size] = run(size)
        return target.met(seen[size])

    high = 1
    while not meets(high) and high < most:
        high = min(2 * high, most)
    if meets(high):
        # low fails: 0 replicas always do
        low = max((size for size in seen if size < high), default=0)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if meets(middle) else (middle, high)
        return Found(high, seen[high], _tried(seen))
    return Found(None, max(seen.values(), key=lambda s: s.attainment), _tried(seen))


def highest_rate(
    run: Callable[[float], Summary],
    target: Target,
    *,
    low: float,
    high: float,
    precision: float = 0.05,
) -> Found:
    """Return the highest load that meets ``target``: DistServe's goodput (OSDI'24, arXiv
    2401.09670); doubled from ``low`` until the target is missed, then bisected.

    Args:
        low, high: requests per second that bound the answer; a target that ``high`` meets gives
            ``high``.
        precision: the answer is below the true one by at most this share.
    """
    if not 0 < low < high or not 0 < precision < 1:
        raise ConfigError(
            f"needs 0 < low < high and 0 < precision < 1, got {low:g}, {high:g}, {precision:g}"
        )
    seen: dict[float, Summary] = {}

    def meets(rate: float) -> bool:
        seen[rate] = run(rate)
        return target.met(seen[rate])

    if not meets(low):
        return Found(None, seen[low], _tried(seen))
    # doubled until it fails, because runs far beyond the limit take longest
    while (above := min(2 * low, high)) > low:
        if not meets(above):
            high = above
            break
        low = above
    if low == high:
        return Found(high, seen[high], _tried(seen))
    while high / low > 1 + precision:
        # rates span orders of magnitude, so their ratio is halved
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    return Found(low, seen[low], _tried(seen))


def _tried(seen: dict[int, Summary] | dict[float, Summary]) -> tuple[tuple[float, float], ...]:
    return tuple((float(size), run.attainment) for size, run in seen.items())
