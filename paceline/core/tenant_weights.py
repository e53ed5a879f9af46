"""Weights of tenants: their shares of the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["TenantWeights"]


class TenantWeights:
    """Shares of tenants: of two that both always wait, one of weight 3 is served three times the
    tokens of one of weight 1. A tenant that ``weights`` does not name has weight 1.

    Args:
        weights: above 0, by tenant.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)

    def of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def sum_of(self, *groups: Collection[str]) -> float:
        """Return the total weight of the tenants in ``groups``, which must be disjoint. O(tenants
        that have weights)."""
        total = float(sum(map(len, groups)))
        for tenant, weight in self._weights.items():
            if any(tenant in group for group in groups):
                total += weight - 1.0
        return total
