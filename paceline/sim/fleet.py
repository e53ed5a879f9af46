"""A fleet in the simulator: the controller that starts and drains processes decides here too, which
of a pool's replicas take requests.

Of the pool's replicas those that the controller has started, and that have had the time to start,
take requests; a drained one finishes what it has. The simulator may kill one (``kills``), whose
requests go on at others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

from paceline.errors import ConfigError
from paceline.fleet.controller import Controller, Seen, Spec
from paceline.routing import Demand, EngineLoad, PredictedRouter, Pressure, choose

__all__ = ["FleetRouter"]

# candidates of a choice, as in a gateway
_CANDIDATES: Final = 16
_SHORT: Final = Demand(100.0, 100.0, 100.0)


class FleetRouter(PredictedRouter):
    """The gateway's choice among the replicas that a controller keeps.

    Args:
        start_seconds: from a replica's start until it takes requests.
        period: seconds between two steps of the controller.
        changes: goals by the time at which they are set, in order.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        start_seconds: float,
        period: float = 1.0,
        changes: Mapping[float, Spec] | None = None,
        staleness: float = 0.25,
        seed: int = 0,
    ) -> None:
        super().__init__(staleness=staleness, seed=seed)
        self.controller = Controller("sim", spec, number=spec.replicas + 1)
        # seconds that replicas ran, summed
        self.replica_seconds = 0.0
        # (time, replicas wanted) at each change
        self.sizes: list[tuple[float, int]] = []
        self._period, self._next_at = period, 0.0
        self._start_seconds = start_seconds
        self._changes = list((changes or {}).items())
        self._pick_draw = random.Random(seed)
        # replica -> its place among the simulated ones, and when it takes requests
        self._places: dict[str, tuple[int, float]] = {}
        self._free: list[int] = []
        self._open: list[int] = []
        # replicas that have ended since the controller's last step
        self._ended_names: list[str] = []
        for number in range(spec.replicas):
            name = f"sim-{number + 1}"
            self.controller.adopt(name, spec.version, f"http://{name}", 0.0)
            self._places[name] = number, 0.0

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
        if not self.loads:
            self.loads = [EngineLoad(str(place)) for place in range(count)]
            self._waiting = [set() for _ in range(count)]
            taken = {place for place, _ in self._places.values()}
            self._free = [place for place in reversed(range(count)) if place not in taken]
        while self._next_at <= now:
            self._step(self._next_at, look)
            self._next_at += self._period
        places = self._open
        if not places:
            raise ConfigError(
                f"no replica of the fleet serves at {now:g} s: kill fewer of them within the "
                f"{self._start_seconds:g} s that one takes to start"
            )
        if len(places) > 2 * _CANDIDATES:
            places = self._pick_draw.sample(places, _CANDIDATES)
        for place in places:
            self._poll(place, now, look)
        views = [self.loads[place].view(demand, now) for place in places]
        chosen = choose(views, demand, self._pick_draw)
        return self.dispatch(number, places[chosen], views[chosen], demand, now, fetched=fetched)

    def killed(self, index: int) -> None:
        """Take a replica for gone at once, as a closed connection says so; the controller replaces
        it."""
        name = next((name for name, (place, _) in self._places.items() if place == index), None)
        if name is None:
            # it was stopped, and still ran what it had
            return
        del self._places[name]
        self._ended_names.append(name)
        self._free.insert(0, index)
        self._open = [place for place in self._open if place != index]

    def _poll(self, place: int, now: float, look: Callable[[int], Pressure]) -> None:
        load = self.loads[place]
        if load.pressure is None or now - load.pressure.at >= self._staleness:
            load.heard(look(place))

    def _step(self, now: float, look: Callable[[int], Pressure]) -> None:
        controller = self.controller
        while self._changes and self._changes[0][0] <= now:
            controller.change(self._changes.pop(0)[1])
        seen = {}
        for name, (place, ready_at) in self._places.items():
            is_up = now >= ready_at
            if is_up:
                self._poll(place, now, look)
            load = self.loads[place]
            pressure = load.pressure
            seen[name] = Seen(
                url=f"http://{name}" if is_up else "",
                alive=True,
                up=is_up,
                requests=len(load.running),
                wait=load.wait(_SHORT, now) if controller.spec.scale else None,
                kv=None if pressure is None else pressure.kv,
                slots=None if pressure is None else pressure.slots,
            )
        seen |= dict.fromkeys(self._ended_names, Seen(alive=False))
        self._ended_names.clear()
        wanted = controller.wanted
        for command in controller.step(now, seen):
            if command.kind == "start":
                place = self._free.pop()
                load = self.loads[place] = EngineLoad(str(place))
                load.expect_like([self.loads[other] for other in self._open])
                self._places[command.name] = place, now + self._start_seconds
            else:
                # what it still runs ends there, as at a server that drains
                place, _ = self._places.pop(command.name)
                self._ended_names.append(command.name)
                self._free.insert(0, place)
        if controller.wanted != wanted or not self.sizes:
            self.sizes.append((now, controller.wanted))
        members = controller.members(now)
        closed = {*members.draining}
        self._open = [
            self._places[name][0]
            for name in members.engines
            if name not in closed and now >= self._places[name][1]
        ]
        self.replica_seconds += len(self._places) * self._period
