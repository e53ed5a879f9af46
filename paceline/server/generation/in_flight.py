"""Requests in flight, for ``GET /slots``."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from paceline.engine.types import GenerationRequest
from paceline.server.observability.metrics.requests import RequestObserver

__all__ = ["Entry", "UnderWay"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One request between its start and its end, waiting or running."""

    # slot number: the smallest that was free when the request began, from 0
    place: int
    # number in order of arrival, from 0
    number: int
    request: GenerationRequest
    # counts its tokens so far
    counted: RequestObserver


class UnderWay:
    """Requests by slot. Used from the event loop's thread."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        # free slots below the largest number of entries there ever were at once
        self._free: list[int] = []
        self._begun = 0

    def enter(self, request: GenerationRequest, counted: RequestObserver) -> int:
        """Add a request; return its slot, for ``leave``."""
        place = heapq.heappop(self._free) if self._free else len(self._entries)
        self._entries[place] = Entry(place, self._begun, request, counted)
        self._begun += 1
        return place

    def leave(self, place: int) -> None:
        del self._entries[place]
        heapq.heappush(self._free, place)

    def entries(self) -> list[Entry]:
        """Return the entries, in slot order."""
        return [entry for _, entry in sorted(self._entries.items())]
