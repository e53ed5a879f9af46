"""Limits of steps where no request has targets: the null object of pacing.

Steps are no larger than brings throughput, running requests get their tokens first, and waiting
ones are admitted in the policy's order.

This module does not know targets, tiers, tenants or forecasts.
"""

from __future__ import annotations

from paceline.core.memory.pressure import Pressure, PressureValve
from paceline.core.policies import overrides
from paceline.core.predict.chunk import ChunkSize
from paceline.core.step.displacement import Displacement
from paceline.core.step.limits import Pass, StepLimits
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["Plain", "cap_chunk"]

# prompt tokens of a step under memory pressure, at least
_MIN_CHUNK = 32


def cap_chunk(tokens: int, num_running: int, pressure: Pressure) -> int:
    """Tokens of a step under memory pressure: a quarter of the prompt tokens."""
    if pressure < Pressure.SMALL_CHUNKS:
        return tokens
    return min(tokens, num_running + max(_MIN_CHUNK, (tokens - num_running) // 4))


class Plain:
    """A ``Pacing``."""

    pressing = False

    def __init__(
        self,
        state: SchedulerState,
        chunk: ChunkSize,
        displacement: Displacement,
        valve: PressureValve,
    ) -> None:
        self._state = state
        self._chunk = chunk
        self._valve = valve
        # without best effort, the other policies displace no request
        displaces = overrides(state.policy, "displaces")
        self._displacement = displacement if displaces else None

    def limits(self, now: float, starts: float, *, held: bool) -> StepLimits:
        state = self._state
        running = state.running.requests
        tokens = self._chunk.plain_tokens(running)
        limits = StepLimits(state, tokens)
        limits.chunk_tokens = tokens - len(running)
        if self._valve.level:
            limits.tokens = cap_chunk(tokens, len(running), self._valve.level)
        if self._displacement is not None and not held:
            head = state.waiting.ordinary.peek()
            if head is not None:
                limits.reserved = self._displacement.make_way(head, now, state.policy.displaces)
        limits.passes = (Pass(list(running), [], Tier.ORDINARY),)
        return limits

    def rest(self) -> None:
        """Nothing of a request is kept."""
