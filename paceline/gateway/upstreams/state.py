"""State of an engine in one word, for people and for monitoring."""

from __future__ import annotations

from typing import Literal

from paceline.gateway.upstreams.upstream import Engine

__all__ = ["EngineState", "state_of"]

EngineState = Literal[
    # gets no new requests: drained by an admin, without answers to polls, with an open breaker, or
    # in a cooldown
    "draining",
    "silent",
    "failing",
    "paused",
    # gets some requests: one at a time, a trickle, or a growing share after it came back
    "half-open",
    "slow",
    "starting",
    # short of memory, or at its bound of requests
    "pressed",
    "full",
    "ready",
]


def state_of(engine: Engine, now: float) -> EngineState:
    """Return the first state that holds, in the order above. A model's trouble is the engine's
    state if all models that it was asked for share it."""
    breaker = engine.breaker_state(now)
    if engine.draining:
        return "draining"
    if engine.num_misses:
        return "silent"
    if breaker == "open":
        return "failing"
    if engine.cooldown_left(now):
        return "paused"
    if breaker == "half-open":
        return "half-open"
    if engine.load.pace.slow_since is not None:
        return "slow"
    if engine.share(now) < 1.0:
        return "starting"
    if engine.load.pressed:
        return "pressed"
    return "ready" if engine.free_slots else "full"
