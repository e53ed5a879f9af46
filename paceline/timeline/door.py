"""Frames about requests before the engine's queue: those that wait there, and those refused.

Requests that wait for their grammar are listed all together whenever one is added or removed, so a
reader that begins at any time knows them; refused requests are listed once. Only a limited number
of both is named, so that a flood of them costs no more. An error's text may hold a caller's input,
so only its kind is written.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from paceline.timeline.codec import clipped, encode
from paceline.timeline.events import FrameType, Told

__all__ = ["Door"]

# most requests named in one frame
_MOST_HELD: Final = 64
_MOST_REFUSED: Final = 32


class _Asked(NamedTuple):
    request_id: str
    slo_class: str
    tenant: str
    # time of arrival, or of the refusal
    time: float


class Door:
    """Gets each request that begins to wait for its grammar, the ids that are left when others stop
    waiting, and each refusal."""

    def __init__(self) -> None:
        self._held: dict[str, _Asked] = {}
        self._refused: list[tuple[_Asked, str]] = []
        self._num_refused = 0
        self._changed = False

    def hold(self, request_id: str, slo_class: str, tenant: str, arrival: float) -> None:
        self._held[request_id] = _Asked(request_id, slo_class, tenant, arrival)
        self._changed = True

    def keep(self, request_ids: Collection[str]) -> None:
        """Keep only these of the waiting requests."""
        if len(request_ids) != len(self._held):
            kept = set(request_ids)
            self._held = {name: asked for name, asked in self._held.items() if name in kept}
            self._changed = True

    def refuse(self, request_id: str, slo_class: str, tenant: str, now: float, kind: str) -> None:
        """Note a refusal; ``kind``: the reason of a QueueFullError, or another error's name."""
        self._num_refused += 1
        self._changed = True
        if len(self._refused) < _MOST_REFUSED:
            self._refused.append((_Asked(request_id, slo_class, tenant, now), kind))

    def take(self, *, whole: bool) -> bytes:
        """Return the news since the last call; ``whole``: the waiting requests in any case, for a
        reader that begins here."""
        if not (self._changed or (whole and self._held)):
            return b""
        held = list(self._held.values())[:_MOST_HELD]
        told = {
            "held": [_named(asked) for asked in held],
            "num_held": len(self._held),
            "refused": [[*_named(asked), kind] for asked, kind in self._refused],
            "num_refused": self._num_refused,
        }
        self._refused, self._num_refused, self._changed = [], 0, False
        return encode(Told(FrameType.DOOR, told))


def _named(asked: _Asked) -> list[str | float]:
    return [*map(clipped, asked[:3]), round(asked.time, 6)]
