"""Tenants that have requests or had some lately, and tenants that have far fewer than others.

A tenant that asks for adapters is several *flows*, one for each adapter and one for the model; any
other tenant is one. Among tenants the share of each is by its weight; a tenant's share is divided
equally among its flows.

This module does not know the policy, or what runs.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from paceline.core.queues.fair_queue import TenantWeights

__all__ = ["TenantShares"]

# part of an equal share up to which a tenant, or one of its flows, is light
_LIGHT: Final = 0.5
# longest step while tenants share the engine, and while a flow of one tenant is in a flood, as a
# multiple of the time of its rows alone
_TENANT_ROWS: Final = 3.0
_FLOW_ROWS: Final = 2.0
# number of the last arrivals that count as recent
_LATELY: Final = 256


class TenantShares:
    """Counts unfinished requests by tenant and by flow, and knows which flows asked lately.

    An ``adapter`` is a name by ``fair_queue.adapter_of``.
    """

    def __init__(self, weights: TenantWeights) -> None:
        self._weights = weights
        self._unfinished: Counter[str] = Counter()
        self._num_unfinished = self._num_arrivals = 0
        # by tenant: unfinished requests of each flow
        self._flows: dict[str, Counter[str]] = {}
        # number of the last arrival of each recent flow, the earliest first
        self._lately: dict[tuple[str, str], int] = {}
        # how many of these flows are a tenant's
        self._recent: Counter[str] = Counter()

    def on_arrival(self, tenant: str, adapter: str = "") -> None:
        """Count a request of the tenant that was queued."""
        self._unfinished[tenant] += 1
        self._flows.setdefault(tenant, Counter())[adapter] += 1
        self._num_unfinished += 1
        self._num_arrivals += 1
        self._recent[tenant] += self._lately.pop((tenant, adapter), None) is None
        self._lately[tenant, adapter] = self._num_arrivals
        earliest = next(iter(self._lately))
        if self._lately[earliest] <= self._num_arrivals - _LATELY:
            del self._lately[earliest]
            _take_one(self._recent, earliest[0])

    def on_finish(self, tenant: str, adapter: str = "") -> None:
        """Count a request of the tenant that ended."""
        self._num_unfinished -= 1
        _take_one(self._unfinished, tenant)
        _take_one(flows := self._flows[tenant], adapter)
        if not flows:
            del self._flows[tenant]

    @property
    def step_rows(self) -> float:
        """Return the longest step, as a multiple of the time of its rows alone, while requests of
        more than one tenant arrived lately; or of more than one flow of a tenant, which has so many
        now that one more, of another flow, would be light. Infinite: neither."""
        if len(self._recent) > 1:
            return _TENANT_ROWS
        flows = sum(map(len, self._flows.values())) + 1
        is_flood = len(self._lately) > 1 and flows <= _LIGHT * (self._num_unfinished + 1)
        return _FLOW_ROWS if is_flood else math.inf

    def has_others(self, tenant: str) -> bool:
        """Return whether a tenant other than ``tenant`` has requests, or had some lately."""
        return any(len(known) > (tenant in known) for known in (self._unfinished, self._recent))

    def has_other_flows(self, tenant: str, adapter: str) -> bool:
        """Return whether a tenant has, or had lately, requests for others than ``adapter``."""
        lately = {flow for name, flow in self._lately if name == tenant}
        own = self._flows.get(tenant, ())
        return any(len(known) > (adapter in known) for known in (own, lately))

    def unfinished(self, tenant: str, adapter: str | None = None) -> int:
        """Return the number of a tenant's unfinished requests; for one adapter, if it is given."""
        if adapter is None:
            return self._unfinished[tenant]
        return self._flows.get(tenant, Counter())[adapter]

    def is_light(self, tenant: str, adapter: str = "") -> bool:
        """Return whether a tenant with one more request has at most half of its share of all
        requests; or has at most its share, and one more for ``adapter`` is at most half of that
        flow's.

        A tenant above its share gains nothing by the number of its flows.
        """
        own, share = self._unfinished[tenant] + 1, self._share(tenant)
        if share is not None and own <= _LIGHT * share:
            return True
        flows = self._flows.get(tenant, ())
        num_flows = len(flows) + (adapter not in flows)
        if num_flows == 1 or (share is not None and own > share):
            return False
        return self.unfinished(tenant, adapter) + 1 <= _LIGHT * own / num_flows

    def _share(self, tenant: str) -> float | None:
        """Return a tenant's share of all requests and one more; None: no other tenant has any."""
        is_known = tenant in self._unfinished
        if len(self._unfinished) == is_known:
            return None
        weight = self._weights.of(tenant)
        weights = self._weights.sum_of(self._unfinished) + (0.0 if is_known else weight)
        return (self._num_unfinished + 1) * weight / weights


def _take_one(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
