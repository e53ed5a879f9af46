"""State of an engine in one word, for people and for monitoring."""

from __future__ import annotations

from typing import Literal

from paceline.gateway.upstreams.upstream import Upstream

__all__ = ["UpstreamState", "state_of"]

UpstreamState = Literal[
    # gets no new requests: drained by an admin, without answers to polls, with an open breaker, or
    # in a cooldown
    "draining",
    "unreachable",
    "failing",
    "cooling_down",
    # gets some requests: one at a time, a trickle, or a growing share after it came back
    "half-open",
    "slow",
    "starting",
    # short of memory, or at its bound of requests
    "memory_pressure",
    "at_capacity",
    "ready",
]


def state_of(upstream: Upstream, now: float) -> UpstreamState:
    """Return the first state that holds, in the order above. A model's trouble is the engine's
    state if all models that it was asked for share it."""
    breaker = upstream.breaker_state(now)
    if upstream.draining:
        return "draining"
    if upstream.num_misses:
        return "unreachable"
    if breaker == "open":
        return "failing"
    if upstream.cooldown_left(now):
        return "cooling_down"
    if breaker == "half-open":
        return "half-open"
    if upstream.load.pace.slow_since is not None:
        return "slow"
    if upstream.share(now) < 1.0:
        return "starting"
    if upstream.load.pressed:
        return "memory_pressure"
    return "ready" if upstream.free_slots else "at_capacity"
