"""Whose requests there are and were lately, and who has far fewer than others.

This module does not know the policy, or what runs.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from paceline.core.tenant_weights import TenantWeights

__all__ = ["TenantShares"]

# of an equal share: a tenant with no more than this is light
_LIGHT: Final = 0.5
# requests that are lately
_LATELY: Final = 256


class TenantShares:
    """Counts requests by tenant: the unfinished, and the last that came."""

    def __init__(self, weights: TenantWeights) -> None:
        self._weights = weights
        self._unfinished: Counter[str] = Counter()
        self._num_unfinished = 0
        self._last: deque[str] = deque()
        self._lately: Counter[str] = Counter()

    def came(self, tenant: str) -> None:
        """One more."""
        self._unfinished[tenant] += 1
        self._num_unfinished += 1
        self._last.append(tenant)
        self._lately[tenant] += 1
        if len(self._last) > _LATELY:
            first = self._last.popleft()
            self._lately[first] -= 1
            if not self._lately[first]:
                del self._lately[first]

    def went(self, tenant: str) -> None:
        """One less."""
        self._num_unfinished -= 1
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant asked for something lately."""
        return len(self._lately) > 1

    def has_others(self, tenant: str) -> bool:
        """Whether a tenant other than ``tenant`` asks, or did lately."""
        return any(len(known) > (tenant in known) for known in (self._unfinished, self._lately))

    def unfinished(self, tenant: str) -> int:
        """How many requests of a tenant there are."""
        return self._unfinished[tenant]

    def is_light(self, tenant: str) -> bool:
        """Whether a tenant with one more request would have at most half its share of all, which
        is an equal one unless tenants have weights."""
        own = self._unfinished[tenant] + 1
        is_known = tenant in self._unfinished
        if len(self._unfinished) == is_known:
            return False
        weight = self._weights.of(tenant)
        weights = self._weights.sum_of(self._unfinished) + (0.0 if is_known else weight)
        return own <= _LIGHT * (self._num_unfinished + 1) * weight / weights
