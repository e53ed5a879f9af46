"""A queue in the order of keys."""

from __future__ import annotations

import pytest

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


def test_members_are_known_and_the_first_is_seen_before_it_is_taken() -> None:
    queue = RequestQueue()
    assert queue.peek() is queue.pop() is None and not len(queue)
    first, second = (make_request(name, 1) for name in ("first", "second"))
    second.order = (0.0, 1)
    queue.push(second)
    queue.push(first)
    assert queue.peek() is first and len(queue) == 2 and set(queue) == {first, second}
    assert queue.pop() is first
    assert second in queue and first not in queue


def test_a_member_that_comes_back_elsewhere_is_not_found_at_its_old_place() -> None:
    """Its old entry is still in the heap, and comes first."""
    queue = RequestQueue()
    mover, other = make_request("mover", 1), make_request("other", 1)
    mover.order, other.order = (0.0, 0), (1.0, 1)
    queue.push(mover)
    queue.push(other)
    queue.remove(mover)
    mover.order = (2.0, 0)
    queue.push(mover)
    queue.check_integrity()
    assert [queue.pop(), queue.pop(), queue.pop()] == [other, mover, None]


def test_entries_of_those_that_left_do_not_pile_up() -> None:
    queue = RequestQueue()
    stays = make_request("stays", 1)
    queue.push(stays)
    for number in range(1000):
        request = make_request(f"r{number}", 1)
        request.order = (float(number), number)
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) < 200
    assert queue.pop() is stays


def test_integrity_finds_a_member_whose_order_was_changed_in_place() -> None:
    queue = RequestQueue()
    request = make_request("a", 1)
    queue.push(request)
    request.order = (3.0, 0)
    with pytest.raises(AssertionError, match="order has changed"):
        queue.check_integrity()
