"""Index of the engine that stores each response, file and batch.

It is only a shortcut: all engines are asked about an unknown id (``kept``), such as after a restart
of the gateway or behind another gateway.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

__all__ = ["Home", "Homes"]

_MOST: Final = 100_000


@dataclass(frozen=True, slots=True)
class Home:
    """Engine that stores an object."""

    engine: str
    # name of the key that made it; None: unknown, as the object was found by asking
    tenant: str | None


class Homes:
    """Bounded map from the latest ids to their engines."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def note(self, kept_id: str, engine: str, tenant: str | None) -> None:
        """Record where an object is stored."""
        self._homes[kept_id] = Home(engine, tenant)
        self._homes.move_to_end(kept_id)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def find(self, kept_id: str) -> Home | None:
        """Return where an object is stored; None: unknown."""
        home = self._homes.get(kept_id)
        if home is not None:
            self._homes.move_to_end(kept_id)
        return home

    def forget(self, kept_id: str) -> None:
        """Forget an object that was deleted."""
        self._homes.pop(kept_id, None)
