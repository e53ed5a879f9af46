"""Who runs, who waits and who holds blocks, by SLO class; counted when somebody asks.

This module does not decide anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.core.request import Request

__all__ = ["ClassUse", "take_census"]


class ClassUse(NamedTuple):
    """One class of requests at one moment."""

    slo_class: str
    num_running: int
    num_waiting: int
    # entries of block tables: a block that several requests share counts for each
    num_blocks: int


def take_census(running: Iterable[Request], waiting: Iterable[Request]) -> tuple[ClassUse, ...]:
    """Classes that have a request, sorted by name. Takes time in proportion to the requests, not to
    their blocks."""
    counts: dict[str, list[int]] = {}
    for place, requests in enumerate((running, waiting)):
        for request in requests:
            use = counts.setdefault(request.asked.slo.slo_class, [0, 0, 0])
            use[place] += 1
            use[2] += len(request.block_ids)
    return tuple(ClassUse(name, *counts[name]) for name in sorted(counts))
