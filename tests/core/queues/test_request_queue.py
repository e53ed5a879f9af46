"""A queue in the order of keys."""

from __future__ import annotations

from paceline.core.queues.request_queue import RequestQueue
from tests.driving import make_request


def test_queue_pops_in_order_and_survives_removals() -> None:
    queue = RequestQueue()
    requests = [make_request(f"r{i}", 1) for i in range(300)]
    for index, request in enumerate(requests):
        request.order = (float((index * 37) % 300), index)
        queue.push(request)
    for request in requests[::2]:
        queue.remove(request)
    queue.check_integrity()
    assert len(queue) == 150
    popped = []
    while (request := queue.pop()) is not None:
        popped.append(request.order)
    assert popped == sorted(r.order for r in requests[1::2])
