"""How an engine stands, in one word: for people, and for what watches a gateway."""

from __future__ import annotations

from typing import Literal

from paceline.gateway.engine import Engine

__all__ = ["EngineState", "state_of"]

EngineState = Literal[
    # gets no new requests: by an admin, because it answers no polls, because its breaker is open,
    # because it asked for a pause
    "draining",
    "silent",
    "failing",
    "paused",
    # gets some: one at a time behind a breaker, a trickle, a growing share after it came back
    "half-open",
    "slow",
    "starting",
    # short of memory, or with as many requests as it may have
    "pressed",
    "full",
    "ready",
]


def state_of(engine: Engine, now: float) -> EngineState:
    """The first that holds, in the order above. What its answers say is of a model: it holds of the
    engine where it does of every model that it was asked for."""
    breaker = engine.breaker_state(now)
    if engine.draining:
        return "draining"
    if engine.num_misses:
        return "silent"
    if breaker == "open":
        return "failing"
    if engine.rests_for(now):
        return "paused"
    if breaker == "half-open":
        return "half-open"
    if engine.load.pace.slow_since is not None:
        return "slow"
    if engine.share(now) < 1.0:
        return "starting"
    if engine.load.pressed:
        return "pressed"
    return "ready" if engine.places else "full"
