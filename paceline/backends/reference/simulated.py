"""The null backend's tokens in modelled time: an executor that sleeps.

A step takes the seconds that a function of its plan returns, one after another as on one
accelerator: it starts when it was handed over or when the step before it ended. A caller that asks
for a result sleeps until the step's end; clock and sleep are arguments, so time may be virtual.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from paceline.backends.reference.null import NullBackend
from paceline.core.backend import BackendInfo
from paceline.core.grammar import MatcherSource
from paceline.core.outputs import SchedulerOutput, StepResult

__all__ = ["SimulatedBackend"]


class _Sleeper(Future[StepResult]):
    """A result that is known at once, and returned when its step has ended."""

    def __init__(self, result: StepResult, wait: Callable[[float | None], bool]) -> None:
        super().__init__()
        self._wait = wait
        self.set_result(result)

    def result(self, timeout: float | None = None) -> StepResult:
        if not self._wait(timeout):
            raise TimeoutError
        return super().result()


class SimulatedBackend:
    """A null backend whose steps take modelled time; see the module.

    Args:
        backend: gives the tokens and the limits; owned by this object.
        seconds: duration of a step, from its plan.
        clock: seconds, monotonic.
        sleep: returns once ``clock`` has moved on by its argument.
        swap_block_seconds: time to move a block to or from host memory, before or after a step; as
            with a model, it is not part of the step's reported time.
    """

    def __init__(
        self,
        backend: NullBackend,
        seconds: Callable[[SchedulerOutput], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        swap_block_seconds: float = 0.0,
    ) -> None:
        self._backend = backend
        self._info = replace(backend.info, name="simulated")
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._swap_block_seconds = swap_block_seconds
        # when the last submitted step ends
        self._free = clock()

    @property
    def info(self) -> BackendInfo:
        return self._info

    def constrain(self, matchers: MatcherSource) -> None:
        """Leave grammars to the null backend."""
        self._backend.constrain(matchers)

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        seconds = self._seconds(plan)
        moving = self._swap_block_seconds
        end = max(self._clock(), self._free) + moving * len(plan.swaps) + seconds
        self._free = end
        result = replace(self._backend.execute(plan).result(), elapsed=seconds)

        def wait(timeout: float | None) -> bool:
            left = end - self._clock()
            ended = timeout is None or left <= timeout
            if left > 0:
                self._sleep(left if ended or timeout is None else timeout)
            return ended

        return _Sleeper(result, wait)

    def close(self) -> None:
        self._backend.close()
