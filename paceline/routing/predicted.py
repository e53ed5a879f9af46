"""The gateway's way to choose, for the simulator: predicted seconds, learned online.

Beside what ``Router`` sees it is told when a first token came, when a request ended, and now and
then how each engine is. It learns from that alone, so it needs to know nothing of what the engines
are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from paceline.routing.choice import choose
from paceline.routing.engine_load import Demand, Dispatch, EngineLoad, Pressure

__all__ = ["PredictedRouter"]


class PredictedRouter:
    """Of one set of engines.

    Args:
        staleness: seconds between two looks at an engine; 0: it is asked at every request.
        seed: of draws among engines that are as good as each other.
    """

    def __init__(self, *, staleness: float = 0.25, seed: int = 0) -> None:
        self._staleness = staleness
        self._draw = random.Random(seed)
        self.loads: list[EngineLoad] = []
        # by request, where it went and its ticket
        self._sent: dict[int, tuple[int, Dispatch]] = {}
        # of each engine, requests without a first token
        self._waiting: list[set[int]] = []

    def choose(self, prefix: Sequence[int], outstanding: Sequence[float]) -> int:
        """As ``Router``, of who tells nothing else: the fewest tokens outstanding."""
        return min(range(len(outstanding)), key=outstanding.__getitem__)

    def send(
        self,
        number: int,
        demand: Demand,
        now: float,
        count: int,
        look: Callable[[int], Pressure],
    ) -> int:
        """Where request ``number`` goes, of ``count`` engines; ``look`` asks one how it is."""
        while len(self.loads) < count:
            self.loads.append(EngineLoad(str(len(self.loads))))
            self._waiting.append(set())
        for index, load in enumerate(self.loads):
            if load.pressure is None or now - load.pressure.at >= self._staleness:
                load.heard(look(index))
        views = [load.view(demand, now) for load in self.loads]
        index = choose(views, demand, self._draw)
        load = self.loads[index]
        self._sent[number] = index, load.dispatch(demand, views[index], now)
        self._waiting[index].add(number)
        load.prefixes.add(demand.prefix)
        return index

    def waiting(self) -> list[int]:
        """Requests that were sent and have no first token yet."""
        return [number for numbers in self._waiting for number in numbers]

    def first_token(self, number: int, at: float) -> None:
        index, ticket = self._sent[number]
        self._waiting[index].discard(number)
        ticket.first_token(at)

    def ended(self, number: int, at: float, num_tokens: int) -> None:
        index, ticket = self._sent.pop(number)
        self._waiting[index].discard(number)
        ticket.end(at, num_tokens)
