"""A model runner with a thread of its own: the ModelBackend of everything that runs a model.

All of a model's work is done on that thread, loading included. Two backends in one process share
only the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Protocol

from paceline.core.backend import BackendInfo
from paceline.core.grammar import MatcherSource
from paceline.core.outputs import SchedulerOutput, StepResult

__all__ = ["Runner", "WorkerBackend"]


class Runner(Protocol):
    """An executor of plans, called from the thread."""

    def run(self, plan: SchedulerOutput) -> StepResult: ...

    def constrain(self, matchers: MatcherSource, thread: Executor) -> None: ...


class WorkerBackend:
    """A ``core.backend.ModelBackend`` that runs plans on its own thread.

    Args:
        build: called on the thread; the constructor raises what it raises.
    """

    def __init__(self, build: Callable[[], tuple[Runner, BackendInfo]]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="paceline-model")
        self._mask_thread: ThreadPoolExecutor | None = None
        self._runner: Runner | None = None
        try:
            self._runner, self._info = self._executor.submit(build).result()
        except BaseException:
            self._executor.shutdown()
            raise

    @property
    def info(self) -> BackendInfo:
        return self._info

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        """Queue one step. Raises RuntimeError after ``close``."""
        if self._runner is None:
            raise RuntimeError("the backend is closed")
        return self._executor.submit(self._runner.run, plan)

    def constrain(self, matchers: MatcherSource) -> None:
        assert self._runner is not None, "constrain() after close()"
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-masks")
        self._runner.constrain(matchers, self._mask_thread)

    def close(self) -> None:
        # cleared first: from now on a submitted plan is an error, while queued ones still run
        self._runner = None
        self._executor.shutdown(wait=True)
        if self._mask_thread is not None:
            self._mask_thread.shutdown()
