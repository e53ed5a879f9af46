"""A queue in which tenants take turns."""

from __future__ import annotations

import random

from paceline.core.queues.fair_queue import FairQueue, TenantWeights
from paceline.core.request import Request
from tests.driving import make_request


def test_a_fair_queue_does_not_grow_while_its_head_is_tried_in_vain() -> None:
    queue = FairQueue(0.0, TenantWeights({}))
    for index in range(6):
        request = make_request(f"r{index}", 1, tenant="ab"[index % 2])
        request.order = (float(index), index)
        queue.push(request)
    for _ in range(1000):
        passed = [queue.pop() for _ in range(3)]
        assert [request.request_id for request in passed if request] == ["r0", "r1", "r2"]
        for request in passed:
            assert request is not None
            queue.push(request)
        queue.check_integrity()
    assert len(queue._heap) <= 100
    queue.charge({"a": 5.0})
    popped = [request.request_id for _ in range(6) if (request := queue.pop()) is not None]
    assert popped == ["r1", "r3", "r5", "r0", "r2", "r4"]


def test_a_fair_queue_does_not_look_at_all_tenants_when_one_comes_back() -> None:
    """Callers name them, as many as they like."""
    rng = random.Random(2)
    served: dict[str, float] = {}
    lifted: list[float | None] = []
    looks = 0

    class Watched(FairQueue):
        def counter(self, tenant: str) -> float:
            nonlocal looks
            looks += 1
            return served[tenant]

        def _lift(self, request: Request, least: float | None) -> None:
            lifted.append(least)

    queue = Watched(0.0, TenantWeights({}))
    waiting: set[str] = set()
    for index in range(2000):
        tenant = f"t{index}"
        request = make_request(f"r{index}", 1, tenant=tenant)
        request.order = (0.0, index)
        served[tenant] = float(rng.randrange(1000))
        queue.push(request)
        assert lifted[-1] == min((served[name] for name in waiting), default=None)
        waiting.add(tenant)
        # counters of those who wait grow
        served[rng.choice(sorted(waiting)[-20:])] += 5.0
        if index % 4 == 0:
            popped = queue.pop()
            assert popped is not None
            waiting.remove(popped.asked.tenant)
    assert looks < 20 * 2000
