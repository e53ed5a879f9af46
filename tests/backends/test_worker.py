"""The thread that runs plans: what was swapped out comes back after a step's result, not before."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from paceline.backends.runner import ModelRunner
from paceline.backends.worker import WorkerBackend
from paceline.core.backend import BackendInfo
from paceline.core.outputs import BlockSwap, SchedulerOutput, StepResult

INFO = BackendInfo(
    name="fake",
    vocab_size=8,
    max_model_len=64,
    block_size=4,
    num_blocks=9,
    block_bytes=1,
    dtype="int64",
    device="cpu",
)


class Runner:
    """Writes down what it does; fetching waits until it may go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done: list[str] = []
        self.may_fetch = threading.Event()
        self._error = error

    def run(self, plan: SchedulerOutput) -> StepResult:
        self.done.append(f"step {plan.step_id}")
        return StepResult(plan.step_id, ())

    def prefetch(self, plan: SchedulerOutput) -> None:
        assert self.may_fetch.wait(60.0)
        self.done.append(f"fetch {plan.step_id}")
        if self._error is not None:
            raise self._error


def backend(runner: Runner) -> WorkerBackend:
    return WorkerBackend(lambda: (cast("ModelRunner", runner), INFO))


def plan(step_id: int, *prefetches: BlockSwap) -> SchedulerOutput:
    return SchedulerOutput(step_id, (), (), (), (), 0, prefetches=prefetches)


BACK = BlockSwap(0, 1, False)


def test_a_steps_result_does_not_wait_for_what_is_fetched_for_the_next() -> None:
    runner = Runner()
    made = backend(runner)
    try:
        first = made.execute(plan(0, BACK))
        assert first.result(60.0).step_id == 0
        assert runner.done == ["step 0"]
        # handed over meanwhile, it computes with what was fetched
        second = made.execute(plan(1))
        runner.may_fetch.set()
        assert second.result(60.0).step_id == 1
        assert runner.done == ["step 0", "fetch 0", "step 1"]
    finally:
        runner.may_fetch.set()
        made.close()


def test_blocks_that_did_not_come_back_are_not_computed_with() -> None:
    runner = Runner(error=OSError("host memory is gone"))
    runner.may_fetch.set()
    made = backend(runner)
    try:
        made.execute(plan(0, BACK)).result(60.0)
        # whatever is handed over before it failed runs after it
        made._executor.submit(lambda: None).result(60.0)
        with pytest.raises(OSError, match="host memory is gone"):
            made.execute(plan(1))
    finally:
        made.close()
