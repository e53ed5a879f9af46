"""A queue in which tenants take turns."""

from __future__ import annotations

import random

from paceline.core.queues.fair_queue import FairQueue, TenantWeights, adapter_of
from paceline.core.request import Request
from tests.driving import adapter_use, ask, make_request


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


def test_adapters_of_a_tenant_share_what_the_tenant_gets() -> None:
    """One tenant names ten adapters and another none: both are served alike, and so are the ten."""
    queue, served = FairQueue(0.0, TenantWeights({})), dict.fromkeys("ab", 0)
    for index in range(120):
        of = adapter_use(index % 10)
        for each in (
            ask(make_request(f"a{index}", 1, tenant="a"), adapter=of),
            make_request(f"b{index}", 1, tenant="b"),
        ):
            each.order = (float(index), 2 * index + (each.asked.tenant == "b"))
            queue.push(each)
    by_adapter: dict[str, int] = {}
    for _ in range(100):
        request = queue.pop()
        assert request is not None
        tenant, adapter = request.asked.tenant, adapter_of(request)
        served[tenant] += 1
        by_adapter[adapter] = by_adapter.get(adapter, 0) + 1
        queue.charge({tenant: 1.0})
        queue.charge_adapters({(tenant, adapter): 1.0})
        queue.check_integrity()
    assert served == {"a": 50, "b": 50}
    assert sorted(by_adapter.values()) == [*[5] * 10, 50]


def test_a_queue_divided_among_adapters_loses_no_request() -> None:
    rng, queue, live = random.Random(3), FairQueue(4.0, TenantWeights({"b": 2.0})), set[Request]()
    for index in range(3000):
        if len(live) < 40 and rng.random() < 0.55:
            request = make_request(f"r{index}", 1, tenant=rng.choice("abc"))
            if rng.random() < 0.6:
                ask(request, adapter=adapter_use(rng.randrange(4)))
            request.order = (float(index), index)
            queue.push(request)
            live.add(request)
        elif live and rng.random() < 0.5:
            gone = rng.choice(sorted(live, key=lambda each: each.request_id))
            queue.remove(gone)
            live.remove(gone)
        elif (head := queue.pop()) is not None:
            live.remove(head)
            assert queue.num_ahead(head) <= len(live)
            queue.charge({head.asked.tenant: 3.0})
            queue.charge_adapters({(head.asked.tenant, adapter_of(head)): 3.0})
        queue.check_integrity()
        assert len(queue) == len(live) == len(set(queue))
