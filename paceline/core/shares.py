"""Whose requests there are, and who has far fewer than others.

This module does not know the policy, or what runs.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

__all__ = ["TenantShares"]

# of an equal share: a tenant with no more than this is light
_LIGHT: Final = 0.5


class TenantShares:
    """Counts unfinished requests by tenant."""

    def __init__(self) -> None:
        self._unfinished: Counter[str] = Counter()

    def came(self, tenant: str) -> None:
        """One more."""
        self._unfinished[tenant] += 1

    def went(self, tenant: str) -> None:
        """One less."""
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]

    def unfinished(self, tenant: str) -> int:
        """How many requests of a tenant there are."""
        return self._unfinished[tenant]

    def is_light(self, tenant: str) -> bool:
        """Whether a tenant with one more request would have at most half an equal share of all."""
        own = self._unfinished[tenant] + 1
        tenants = len(self._unfinished) + (tenant not in self._unfinished)
        if tenants == 1:
            return False
        return own <= _LIGHT * (self._unfinished.total() + 1) / tenants
