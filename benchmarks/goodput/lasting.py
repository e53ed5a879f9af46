"""The long row of ``make bench NAME=goodput``: lasting loads beyond capacity, minute by minute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.common.client import Timing
from benchmarks.common.server import Server
from benchmarks.goodput.loads import Load, missed, play, stream

__all__ = ["LOADS", "by_minute", "lasting"]

# as multiples of the server's capacity
LOADS: Final = (1.2, 2.0)
_MINUTE: Final = 60.0


def by_minute(loads: Sequence[Load], timings: Sequence[Timing], minutes: int) -> list[float]:
    """Return the share within, of the requests that arrived in each minute."""
    kept: list[list[bool]] = [[] for _ in range(minutes)]
    for load, timing in zip(loads, timings, strict=True):
        kept[int(load.at // _MINUTE)].append(not missed(load, timing))
    return [round(sum(each) / max(1, len(each)), 3) for each in kept]


def lasting(server: Server, capacity: float, minutes: int, vocab_size: int) -> dict[str, Any]:
    """Return, by load, the shares of all minutes, and the worst later one over the first."""
    found: dict[str, Any] = {}
    for load in LOADS:
        loads = stream(load * capacity, 1.0, minutes * _MINUTE, vocab_size, seed=7)
        shares = by_minute(loads, play(server, loads, classes=True), minutes)
        worst = min(shares[1:], default=shares[0]) / max(1e-9, shares[0])
        found[f"{load:g}"] = {"minutes": shares, "worst_of_first_minute": round(worst, 3)}
        print(f"{minutes} minutes at {load:g} times capacity: {found[f'{load:g}']}", flush=True)
    return found
