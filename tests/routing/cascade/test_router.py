"""A cascade in the simulator decides as the gateway would."""

from __future__ import annotations

from paceline.routing.cascade import Easing
from paceline.routing.cascade.router import CascadeRouter
from paceline.routing.engine_load import Demand, Pressure

DEMAND = Demand(prompt_tokens=100.0, max_tokens=64.0, output_tokens=32.0)


def test_the_threshold_follows_the_wait_at_the_large_engines() -> None:
    scores = {number: number / 10 for number in range(11)}
    router = CascadeRouter(scores.__getitem__, Easing(0.8, 0.3, 1.0))
    twin = Easing(0.8, 0.3, 1.0)
    waits = {0.0: 0, 5.0: 0}
    for wait in waits:
        for number, score in scores.items():
            router.send(number, DEMAND, 0.0, 3, lambda index: Pressure(at=0.0))
            for load in router.loads[1:]:
                load.latency.first_token = lambda *_, wait=wait: wait  # type: ignore[method-assign]
            index = router.send(number, DEMAND, 0.0, 3, lambda index: Pressure(at=0.0))
            assert (index == 0) == (score >= twin.threshold(wait)), (wait, number)
            waits[wait] += index == 0
    assert waits == {0.0: 3, 5.0: 8}
