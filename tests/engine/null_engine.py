"""An engine process over the null backend, for tests: run as a program by ``engine.client``."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

# started by path, from any working directory
sys.path.insert(0, str(Path(__file__).parents[2]))

from paceline.backends.null import NullBackend
from paceline.core.errors import CheckpointError
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.engine.core import EngineCore
from paceline.engine.loop import engine_info
from paceline.engine.process import engine_main
from paceline.engine.testing import null_core
from paceline.engine.types import EngineInfo

ARGV = (sys.executable, __file__)


class FaultyBackend(NullBackend):
    """Breaks at one step."""

    def __init__(self, fail_at_step: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._fail_at_step = fail_at_step

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        if plan.step_id >= self._fail_at_step:
            future: Future[StepResult] = Future()
            future.set_exception(RuntimeError("the matrix is on fire"))
            return future
        return super().execute(plan)


def build(config: bytes) -> tuple[EngineCore, EngineInfo]:
    """``config`` is JSON: what to do instead of loading, and arguments of NullBackend and core."""
    settings = json.loads(config)
    on_load = settings.pop("on_load", None)
    if on_load == "bad checkpoint":
        raise CheckpointError("model.gguf is truncated: 10 of 20 bytes")
    if on_load == "bug":
        raise ZeroDivisionError("loading divided by zero")
    if on_load == "exit":
        sys.exit(7)
    if on_load == "hang":
        time.sleep(60)
    core_settings = settings.pop("core", {})
    fail_at_step = settings.pop("fail_at_step", None)
    backend = (
        NullBackend(**settings) if fail_at_step is None else FaultyBackend(fail_at_step, **settings)
    )
    core = null_core(backend, **core_settings)
    return core, engine_info(core, "null")


if __name__ == "__main__":
    sys.exit(engine_main(build))
