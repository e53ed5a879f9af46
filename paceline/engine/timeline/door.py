"""Who stands before the engine's queue, and who was sent away from there, as frames.

Requests that wait for their grammar are told all together whenever one more waits or one less, so a
reader that begins anywhere knows them; those that were refused are told once. Of both only so many
by name: a flood of them costs no more. What an error says may hold what a caller sent, so its kind
alone is told.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from paceline.engine.timeline.codec import clipped, encode
from paceline.engine.timeline.events import FrameType, Told

__all__ = ["Door"]

# told by name at a time
_MOST_HELD: Final = 64
_MOST_REFUSED: Final = 32


class _Asked(NamedTuple):
    request_id: str
    slo_class: str
    tenant: str
    # when it came, or was refused
    time: float


class Door:
    """Told when a request begins to wait for its grammar, who is left when others do no more, and
    when one is refused."""

    def __init__(self) -> None:
        self._held: dict[str, _Asked] = {}
        self._refused: list[tuple[_Asked, str]] = []
        self._num_refused = 0
        self._changed = False

    def hold(self, request_id: str, slo_class: str, tenant: str, arrival: float) -> None:
        self._held[request_id] = _Asked(request_id, slo_class, tenant, arrival)
        self._changed = True

    def keep(self, request_ids: Collection[str]) -> None:
        """Of those that waited only these do still."""
        if len(request_ids) != len(self._held):
            kept = set(request_ids)
            self._held = {name: asked for name, asked in self._held.items() if name in kept}
            self._changed = True

    def refuse(self, request_id: str, slo_class: str, tenant: str, now: float, kind: str) -> None:
        """``kind``: the reason of a QueueFullError, or another error's name."""
        self._num_refused += 1
        self._changed = True
        if len(self._refused) < _MOST_REFUSED:
            self._refused.append((_Asked(request_id, slo_class, tenant, now), kind))

    def take(self, *, whole: bool) -> bytes:
        """What is new since the last time; ``whole``: who waits in any case, for a reader that
        begins here."""
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
