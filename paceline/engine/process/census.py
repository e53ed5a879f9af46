"""Requests by SLO class, for metrics."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.request import Request, RequestStatus
from paceline.engine.types import ClassUse

__all__ = ["take_census"]


def take_census(requests: Iterable[Request]) -> tuple[ClassUse, ...]:
    """Return the classes that have a request, sorted by name. Takes time in proportion to the
    requests, not to their blocks: too long for every step."""
    counts: dict[str, list[int]] = {}
    for request in requests:
        use = counts.setdefault(request.asked.slo.slo_class, [0, 0, 0])
        use[request.status is not RequestStatus.RUNNING] += 1
        use[2] += len(request.block_ids)
    return tuple(ClassUse(name, *counts[name]) for name in sorted(counts))
