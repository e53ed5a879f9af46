"""A server in virtual time, streams of equal requests for it, and the outcome of each.

It is ``paceline serve`` by its defaults, with PLACES requests at once and steps of STEP seconds. A
request runs for a second, and the next one gets its slot a step later, since a step is planned
while another runs: so CAPACITY requests are served a second.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any, Final

from paceline.cli.flags.scheduling_options import ADMISSION, SCHEDULING, default_settings
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.slo import Slo
from paceline.sim.arrival import Arrival, Served
from paceline.sim.config import ReplicaConfig
from paceline.sim.pool import Pool
from paceline.sim.simulator import Again, PlanObserver, Simulator
from paceline.sim.step_times.base import FixedStepTimes, StepTimes
from paceline.sim.workload.arrivals import renewal

__all__ = [
    "CAPACITY",
    "CHAT",
    "EQUAL",
    "PLACES",
    "PROMPT",
    "SERVICE",
    "STEP",
    "VARIANTS",
    "Played",
    "as_served",
    "best_effort",
    "chats",
    "in_time",
    "play",
    "times",
]

STEP: Final = float(os.environ.get("STEP", "0.04"))
PLACES: Final = 8
PROMPT: Final = 5
# tokens of an answer: the steps in a second
OUTPUT: Final = round(1.0 / STEP)
# seconds for which a request holds a slot, and requests a second that can be served
SERVICE: Final = (OUTPUT + 1) * STEP
CAPACITY: Final = PLACES / SERVICE
# targets of a chat
CHAT: Final = Slo(slo_class="chat", ttft=1.0)
EQUAL: Final = FixedStepTimes(STEP)
# names of servers that are a policy with other settings; a request that waited longer than these
# limits would be late with its first token
VARIANTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "fcfs-bounded": ("fcfs", {"max_predicted_ttft_s": 0.9, "queue_timeout_s": 0.9}),
}
# fields of the scheduler's configuration for every run, to try their effect
OPTIONS: Final[dict[str, Any]] = json.loads(os.environ.get("OPTIONS", "{}"))


def as_served(server: str, **settings: Any) -> ReplicaConfig:
    """Return ``paceline serve``'s configuration with a policy, or one of VARIANTS, and settings."""
    policy, own = VARIANTS.get(server, (server, {}))
    served = default_settings((*SCHEDULING, *ADMISSION))
    given = served | {"policy": policy, "max_model_len": 8192} | own | settings | OPTIONS
    return ReplicaConfig(
        scheduler=SchedulerConfig(**_of(SchedulerConfig, given)),
        cache=CacheConfig(
            **{"block_size": 16, "num_blocks": 8192}
            | _of(CacheConfig, given)
            | {"enable_prefix_caching": False}
        ),
    )


def _of(config: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(config)}
    return {name: value for name, value in values.items() if name in names}


def times(parts: Sequence[tuple[float, float]], seed: int, cv: float = 1.0) -> Iterator[float]:
    """Yield times of arrival for each (seconds, load) in turn, where load 1 is CAPACITY. The
    arrivals of a part depend on its number and load alone."""
    begin = 0.0
    for number, (seconds, load) in enumerate(parts):
        for at in renewal(load * CAPACITY, cv, Random(f"{seed}/{number}")):
            if at >= seconds:
                break
            yield begin + at
        begin += seconds


def chats(moments: Iterable[float], **fields: Any) -> list[Arrival]:
    """Return equal requests with the target CHAT at these times."""
    return [
        Arrival(at, PROMPT, OUTPUT, slo_class="chat", ttft=CHAT.ttft, **fields) for at in moments
    ]


def best_effort(seconds: float, seed: int) -> list[Arrival]:
    """Return equal requests without targets, of which some wait at any time, under any load."""
    few = [0.0] * (2 * PLACES)
    moments = [*few, *times([(seconds, 0.25)], seed + 1_000_000)]
    return [Arrival(at, PROMPT, OUTPUT, slo_class="best-effort") for at in moments]


@dataclass(frozen=True, slots=True)
class Played:
    """Requests and outcomes of a run."""

    arrivals: Sequence[Arrival]
    # outcome of each; None: it had not ended when the run was over
    outcomes: Sequence[Served | None]
    # most requests that waited at once
    most_waiting: int


def play(
    config: ReplicaConfig,
    step_times: StepTimes,
    arrivals: Iterable[Arrival],
    *,
    until: float,
    watch: PlanObserver | None = None,
    again: Again | None = None,
) -> Played:
    """Serve the arrivals until a moment."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.at)
    found: dict[int, Served] = {}

    def take(served: Served) -> None:
        found[id(served.arrival)] = served

    simulator = Simulator(Pool.single(config, step_times), take, on_plan=watch, again=again)
    # a simulation makes a few objects for every token, but no reference cycles
    gc.disable()
    try:
        totals = simulator.run(ordered, until=until)
    finally:
        gc.enable()
    return Played(ordered, [found.get(id(each)) for each in ordered], totals.most_waiting[0])


def in_time(served: Served | None, slo: Slo | None = None) -> bool:
    """Return whether a request met ``slo``, or its own targets if that is None."""
    if served is None or served.first_token is None or served.last_token is None:
        return False
    arrival = served.arrival
    if slo is None:
        slo = Slo(ttft=arrival.ttft, tpot=arrival.tpot, deadline=arrival.deadline)
    return not slo.violations(
        arrival.at, served.first_token, served.last_token, served.output_tokens
    )
