"""An engine process over the null backend, for tests: run as a program by ``engine.client``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# started by path, from any working directory
sys.path.insert(0, str(Path(__file__).parents[2]))

from paceline.backends.reference.null import NullBackend
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.engine.adapters.interface import AdapterLimits, OpenedAdapter
from paceline.engine.adapters.store import AdapterStore
from paceline.engine.core import EngineCore
from paceline.engine.process.loop import engine_info
from paceline.engine.process.process import engine_main
from paceline.engine.testing import null_core
from paceline.engine.types import EngineInfo
from paceline.errors import CheckpointError

ARGV = (sys.executable, __file__)


class FaultyBackend(NullBackend):
    """Breaks from one step on, or with a request whose prompt holds a token: ``die_on`` ends the
    process without a word, once it has generated ``die_at`` tokens, ``hang_on`` makes a step that
    does not end."""

    def __init__(
        self,
        fail_at_step: int | None = None,
        die_on: int | None = None,
        die_at: int = 0,
        hang_on: int | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._fail_at_step = fail_at_step
        self._die_on = die_on
        self._die_at = die_at
        # positions at which a request that was begun ends the process
        self._deadly: dict[str, int] = {}
        self._hang_on = hang_on

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        if self._fail_at_step is not None and plan.step_id >= self._fail_at_step:
            future: Future[StepResult] = Future()
            future.set_exception(RuntimeError("the matrix is on fire"))
            return future
        # without the output of a request that goes on here
        prompts = [new.token_ids[: new.num_prompt_tokens] for new in plan.new_requests]
        for new, prompt in zip(plan.new_requests, prompts, strict=True):
            if self._die_on in prompt:
                # its last known token yields the first
                self._deadly[new.request_id] = new.num_prompt_tokens - 1 + self._die_at
        if any(
            row.start + row.num_tokens > self._deadly.get(row.request_id, sys.maxsize)
            for row in plan.rows
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(self._hang_on in prompt for prompt in prompts):
            time.sleep(600)
        return super().execute(plan)

    def open_adapter(
        self, path: str, max_rank: int | None, dtype: str, pause: Callable[[], None]
    ) -> OpenedAdapter:
        return _Opened(path)

    def load_adapter(
        self, slot: int, opened: OpenedAdapter, pause: Callable[[], None]
    ) -> tuple[str, int]:
        """End the process without a word, if the adapter's path says so."""
        assert isinstance(opened, _Opened)
        if opened.path == "/deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return opened.path, opened.num_bytes

    def drop_adapter(self, slot: int) -> None:
        """Do nothing: there is no memory."""


@dataclass(frozen=True)
class _Opened:
    path: str
    num_bytes: int = 10
    num_products: int = 5
    max_rank: int = 4
    notes: tuple[str, ...] = ()


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
    backend = FaultyBackend(**settings)
    core = null_core(backend, **core_settings)
    core.adapters = AdapterStore(backend, AdapterLimits(100))
    return core, engine_info(core, "null")


if __name__ == "__main__":
    sys.exit(engine_main(build))
