"""How many replicas a load needs, and when their number changes."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from paceline.fleet.controller import Seen
from paceline.fleet.scaling import Scale, Scaling, replicas_for

SCALE = Scale(1, 20, first_token=1.0)


@cache
def pool(count: int, requests: int, **more: float) -> list[Seen]:
    """Replicas of 16 slots that share ``requests``."""
    share, rest = divmod(requests, count)
    return [
        Seen("http://x", True, None, True, share + (n < rest), **({"slots": 16.0} | more))
        for n in range(count)
    ]


def settled(requests: int, count: int = 10, **more: float) -> int:
    """The replicas that a pool of ``count`` has after an hour of this load."""
    scaling = Scaling()
    for second in range(3600):
        count = scaling.wanted(float(second), SCALE, pool(count, requests, **more), count)
    return count


@pytest.mark.parametrize(("requests", "replicas"), [(0, 1), (4, 1), (16, 2), (88, 7), (200, 14)])
def test_a_pool_settles_at_the_square_root_rule(requests: int, replicas: int) -> None:
    assert settled(requests) == settled(requests, 1) == settled(requests, 20) == replicas
    assert replicas == max(1, replicas_for(requests, 16.0))


def test_a_small_pool_keeps_a_larger_share_free() -> None:
    shares = [requests / (16.0 * replicas_for(requests, 16.0)) for requests in (24, 96, 384, 1536)]
    assert shares == sorted(shares) and shares[0] < 0.8 and shares[-1] > 0.95


def test_slots_that_are_all_taken_add_replicas_at_once() -> None:
    scaling = Scaling()
    for second in range(600):
        assert scaling.wanted(float(second), SCALE, pool(3, 36), 3) == 3
    # a burst, before the mean knows of it
    assert scaling.wanted(599.5, SCALE, pool(3, 50), 3) == 3
    assert scaling.wanted(600.0, SCALE, pool(3, 54), 3) == 4
    assert scaling.wanted(601.0, SCALE, pool(3, 80), 4) == 5


def test_scatter_alone_changes_nothing_for_long() -> None:
    """A pool whose load scatters as random arrivals do stays where it is for most of an hour."""
    draw, scaling, count, changes, number = random.Random(1), Scaling(), 4, 0, 45.0
    for second in range(3600):
        # about one a second comes, and each stays for 45 s on average
        number += 1 + (draw.random() < 0.05)
        number -= sum(draw.random() < 1.0 / 45.0 for _ in range(int(number)))
        before = count
        count = scaling.wanted(float(second), SCALE, pool(count, int(number)), count)
        changes += count != before
    assert changes <= 12 and count in (4, 5)


@pytest.mark.parametrize(
    ("more", "room"),
    [({"kv": 0.9}, 4.0), ({"kv": 0.45}, 8.0), ({"wait": 0.45}, 8.0), ({"kv": 0.1}, 16.0)],
)
def test_memory_and_waits_take_room_before_the_slots(more: dict[str, float], room: float) -> None:
    """At 4 requests a replica the slots are a quarter full."""
    scaling = Scaling()
    assert scaling.wanted(0.0, SCALE, pool(5, 20, **more), 1) == replicas_for(20.0, room)


def test_engines_that_report_no_slots_are_judged_by_memory_and_waits() -> None:
    scaling = Scaling()
    seen = [Seen("http://x", True, None, True, 6, kv=0.45)] * 2
    assert scaling.wanted(0.0, SCALE, seen, 2) == math.ceil((12 + 1.25 * math.sqrt(12)) / 12)


def test_a_count_that_is_not_known_changes_nothing() -> None:
    scaling = Scaling()
    unknown = [*pool(2, 64), Seen("http://x", True, None, True, None, slots=16.0)]
    assert scaling.wanted(0.0, SCALE, unknown, 3) == 3
    assert scaling.wanted(1.0, SCALE, [], 3) == 3
    assert scaling.wanted(1.0, Scale(4, 8), [], 3) == 4
