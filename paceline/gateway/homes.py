"""Which engine keeps what: responses, files and batches, by id.

Only a shortcut: every engine is asked for an id that is not here (``kept``), as after a restart of
the gateway, or behind another one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

__all__ = ["Home", "Homes"]

_MOST: Final = 100_000


@dataclass(frozen=True, slots=True)
class Home:
    """Where one of them is."""

    engine: str
    # the key's name that it was made for; None: it was found, and its key is not known
    tenant: str | None


class Homes:
    """Of the latest ids."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def note(self, kept_id: str, engine: str, tenant: str | None) -> None:
        """It is there."""
        self._homes[kept_id] = Home(engine, tenant)
        self._homes.move_to_end(kept_id)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def find(self, kept_id: str) -> Home | None:
        """None: it is not known."""
        home = self._homes.get(kept_id)
        if home is not None:
            self._homes.move_to_end(kept_id)
        return home

    def forget(self, kept_id: str) -> None:
        """It is no longer there."""
        self._homes.pop(kept_id, None)
