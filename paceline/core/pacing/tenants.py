"""Tenants that have requests or had some lately, and tenants that have far fewer than others.

This module does not know the policy, or what runs.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from paceline.core.queues.fair_queue import TenantWeights

__all__ = ["TenantShares"]

# part of an equal share up to which a tenant is light
_LIGHT: Final = 0.5
# number of the last arrivals that count as recent
_LATELY: Final = 256


class TenantShares:
    """Counts unfinished requests by tenant, and knows which tenants asked lately."""

    def __init__(self, weights: TenantWeights) -> None:
        self._weights = weights
        self._unfinished: Counter[str] = Counter()
        self._num_unfinished = self._num_arrivals = 0
        # number of the last arrival of each recent tenant, the earliest first
        self._lately: dict[str, int] = {}

    def on_arrival(self, tenant: str) -> None:
        """Count a request of the tenant that was queued."""
        self._unfinished[tenant] += 1
        self._num_unfinished += 1
        self._num_arrivals += 1
        self._lately.pop(tenant, None)
        self._lately[tenant] = self._num_arrivals
        earliest = next(iter(self._lately))
        if self._lately[earliest] <= self._num_arrivals - _LATELY:
            del self._lately[earliest]

    def on_finish(self, tenant: str) -> None:
        """Count a request of the tenant that ended."""
        self._num_unfinished -= 1
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]

    @property
    def are_several(self) -> bool:
        """Whether requests of more than one tenant arrived lately."""
        return len(self._lately) > 1

    def has_others(self, tenant: str) -> bool:
        """Whether a tenant other than ``tenant`` has requests, or had some lately."""
        return any(len(known) > (tenant in known) for known in (self._unfinished, self._lately))

    def unfinished(self, tenant: str) -> int:
        """Return the number of a tenant's unfinished requests."""
        return self._unfinished[tenant]

    def is_light(self, tenant: str) -> bool:
        """Whether a tenant with one more request has at most half of its share of all requests."""
        own = self._unfinished[tenant] + 1
        is_known = tenant in self._unfinished
        if len(self._unfinished) == is_known:
            return False
        weight = self._weights.of(tenant)
        weights = self._weights.sum_of(self._unfinished) + (0.0 if is_known else weight)
        return own <= _LIGHT * (self._num_unfinished + 1) * weight / weights
