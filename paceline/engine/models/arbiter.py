"""Choices between models: whose step runs next, which model goes, and when one that is in use stops
taking requests for another that waits.

Values in, choices out: nothing here has a state or knows a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Contender", "Resident", "choose_turn", "closes_at", "longest_step", "victims", "worth"]

# seconds for which a model's rate of requests says whether it is wanted soon
_SOON: Final = 300.0
# a model in use serves this multiple of a swap before it makes way: with 5, a sixth of the time
# goes to swaps where two floods alternate
_SERVES_SWAPS: Final = 5.0
# part of a TPOT target that a step may take, and the limit of a neighbour without targets: a
# multiple of its own step, at least so many seconds
_PACE_SHARE: Final = 0.9
_STEPS: Final = 3.0
_LEAST_LIMIT: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An engine that wants to compute a step."""

    # identity, for the caller
    slot: int
    # time since which it has waited
    since: float
    # time by which its step must end; infinite: no request has a target
    due: float = math.inf
    # predicted seconds of the step
    seconds: float = 0.0
    # seconds for which it computes before it can stop in a step
    slice: float = math.inf
    weight: float = 1.0
    # seconds that it computed lately
    used: float = 0.0


def choose_turn(contenders: Sequence[Contender], now: float) -> int | None:
    """Return the slot of the engine that computes next; None: none wants to.

    Those that would be late after one more step of another, or a slice of it, come first, earliest
    due first; else the one that has used least by its weight.
    """
    if not contenders:
        return None

    def pressed(each: Contender) -> bool:
        others = (min(other.seconds, other.slice) for other in contenders if other is not each)
        return each.due < now + each.seconds + max(others)

    pressing = [each for each in contenders if len(contenders) > 1 and pressed(each)]
    if pressing:
        return min(pressing, key=lambda each: (each.due, each.since, each.slot)).slot
    return min(contenders, key=lambda each: (each.used / each.weight, each.since, each.slot)).slot


def longest_step(own_seconds: float, tightest_tpot: float) -> float:
    """Return the seconds that a neighbour's step may take so that this engine's tokens keep their
    pace: what its own step leaves of its tightest TPOT target, or a multiple of its own step."""
    if tightest_tpot == math.inf:
        return max(_LEAST_LIMIT, _STEPS * own_seconds)
    return max(own_seconds, _PACE_SHARE * tightest_tpot - own_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A model in memory that may go."""

    name: str
    num_bytes: int
    load_seconds: float
    # requests a second lately
    rate: float
    last_used: float


def worth(model: Resident) -> float:
    """Return the seconds of loading that keeping a byte of it is expected to save soon."""
    wanted = -math.expm1(-model.rate * _SOON)
    return wanted * model.load_seconds / max(1, model.num_bytes)


def victims(residents: Iterable[Resident], lacking: int, places: int) -> tuple[str, ...] | None:
    """Return the models of least worth whose going frees ``lacking`` bytes and ``places`` places;
    None where all together do not."""
    chosen: list[Resident] = []
    for model in sorted(residents, key=lambda each: (worth(each), each.last_used, each.name)):
        if lacking <= sum(each.num_bytes for each in chosen) and places <= len(chosen):
            break
        chosen.append(model)
    if lacking > sum(each.num_bytes for each in chosen) or places > len(chosen):
        return None
    # a later one may have made an earlier, smaller one needless
    for model in tuple(chosen):
        rest = sum(each.num_bytes for each in chosen) - model.num_bytes
        if rest >= lacking and len(chosen) - 1 >= places:
            chosen.remove(model)
    return tuple(each.name for each in chosen)


def closes_at(head_since: float, loaded_at: float, swap_seconds: float, most: float) -> float:
    """Return the time at which a model in use stops taking requests for one that waits without
    room.

    Args:
        head_since: since when the oldest request of the other has waited.
        loaded_at: since when the model in use is in memory.
        most: seconds that it waits at most, requests that run apart.
    """
    begun = max(head_since, loaded_at)
    return min(begun + _SERVES_SWAPS * swap_seconds, head_since + most)
