"""The gateway's choice of an engine, for the simulator: predicted seconds, learned online.

In addition to what ``Router`` sees, it is told first tokens, ends of requests, and engines' reports
now and then. It learns from these alone, and needs to know nothing else about engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from paceline.routing.choice import choose
from paceline.routing.engine_load import Demand, Dispatch, EngineLoad, EngineView, Pressure

__all__ = ["PredictedRouter"]


class PredictedRouter:
    """Router over one set of engines.

    Args:
        staleness: seconds between two reports of an engine; 0: one at every request.
        seed: of the draws that break ties.
    """

    def __init__(self, *, staleness: float = 0.25, seed: int = 0) -> None:
        self._staleness = staleness
        self._draw = random.Random(seed)
        self.loads: list[EngineLoad] = []
        # request -> its engine and dispatch
        self._sent: dict[int, tuple[int, Dispatch]] = {}
        # per engine, requests without a first token
        self._waiting: list[set[int]] = []

    def choose(self, prefix: Sequence[int], outstanding: Sequence[float]) -> int:
        """Choose by tokens outstanding, as a ``Router`` that is told nothing else."""
        return min(range(len(outstanding)), key=outstanding.__getitem__)

    def send(
        self,
        number: int,
        demand: Demand,
        now: float,
        count: int,
        look: Callable[[int], Pressure],
        *,
        fetched: bool = False,
    ) -> int:
        """Choose one of ``count`` engines for a request; ``look`` fetches an engine's report, and
        ``fetched`` says that another engine has computed the prompt."""
        views = self._views(demand, now, count, look)
        index = self.pick(number, views, demand)
        return self.dispatch(number, index, views[index], demand, now, fetched=fetched)

    def best(
        self, demand: Demand, now: float, count: int, look: Callable[[int], Pressure]
    ) -> EngineView:
        """Return the engine that a request would be sent to, as it sees it."""
        views = self._views(demand, now, count, look)
        return views[choose(views, demand, self._draw)]

    def _views(
        self, demand: Demand, now: float, count: int, look: Callable[[int], Pressure]
    ) -> list[EngineView]:
        while len(self.loads) < count:
            self.loads.append(EngineLoad(str(len(self.loads))))
            self._waiting.append(set())
        for index, load in enumerate(self.loads):
            if load.pressure is None or now - load.pressure.at >= self._staleness:
                load.heard(look(index))
        return [load.view(demand, now) for load in self.loads]

    def dispatch(
        self,
        number: int,
        index: int,
        view: EngineView,
        demand: Demand,
        now: float,
        *,
        fetched: bool = False,
    ) -> int:
        """Count a request that is sent to engine ``index``, which is returned."""
        load = self.loads[index]
        self._sent[number] = index, load.dispatch(demand, view, now, fetched=fetched)
        self._waiting[index].add(number)
        load.prefixes.add(demand.prefix)
        return index

    def pick(self, number: int, views: Sequence[EngineView], demand: Demand) -> int:
        """Pick one of the engines for a request."""
        return choose(views, demand, self._draw)

    def waiting(self) -> list[int]:
        """Return requests that were sent and have no first token yet."""
        return [number for numbers in self._waiting for number in numbers]

    def first_token(self, number: int, at: float) -> None:
        index, ticket = self._sent[number]
        self._waiting[index].discard(number)
        ticket.first_token(at)

    def killed(self, index: int) -> None:
        """Note that an engine has lost everything; one that comes back at once stays a choice."""
        if not self.loads:
            # a lone engine is not chosen
            return
        self.loads[index].pressure = None
        self.loads[index].prefixes.clear()

    def ended(self, number: int, at: float, num_tokens: int) -> None:
        index, ticket = self._sent.pop(number)
        self._waiting[index].discard(number)
        ticket.end(at, num_tokens)
