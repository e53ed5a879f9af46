"""Small seeded workloads for the tests of the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterator

from paceline.sim.arrival import Arrival


def bursty(count: int, seed: int = 1, *, shared: bool = True) -> Iterator[Arrival]:
    """Bursts and pauses; tenants, priorities, targets, some common prefixes of 32 tokens."""
    rng = random.Random(seed)
    at = 0.0
    for number in range(count):
        if rng.random() < 0.3:
            at += rng.expovariate(4.0)
        prefix = tuple([7, rng.randrange(3), rng.randrange(3)][: rng.randrange(4)])
        paced = rng.random() < 0.5
        yield Arrival(
            at=at,
            prompt_tokens=rng.randint(1, 150),
            output_tokens=rng.randint(1, 60),
            prefix=prefix if shared else (),
            slo_class="best-effort" if number % 7 == 0 else ("chat" if paced else "standard"),
            ttft=1.0 if paced else None,
            tpot=0.05 if paced else None,
            tenant=f"t{rng.randrange(3)}",
            priority=rng.randrange(3),
        )
