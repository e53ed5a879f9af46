"""The engine process's entry: ``python -m paceline.cli.serve.engine_process``, started by a client.

Its settings arrive as JSON on standard input; ``engine.process`` does the rest. With the argument
``spare`` it does its imports before they arrive.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from paceline.backends.machine.heap import trim_heap
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.serve.startup import Stages, process_age
from paceline.cli.terminal.logs import configure_logging
from paceline.cli.wiring import build_core
from paceline.engine.core import EngineCore
from paceline.engine.process.process import engine_main
from paceline.engine.types import EngineInfo

__all__ = ["build", "main"]

_log = logging.getLogger("paceline.cli")


def build(config: bytes) -> tuple[EngineCore, EngineInfo]:
    """Build an engine from the bytes of ``EngineSettings.to_json``."""
    stages = Stages(process_age(), time.monotonic())
    settings = EngineSettings.from_json(config)
    configure_logging(settings.log_level, settings.log_format)
    stages.done("import", time.monotonic())
    built = build_core(settings, own_process=True)
    trim_heap()
    stages.done("build", time.monotonic())
    stages.log(_log, "engine_built")
    return built


def shared(config: bytes) -> list[Path]:
    """Return the folder of the page of turns; none without turns."""
    turn = EngineSettings.from_json(config).turn
    return [] if turn is None else [Path(turn).parent]


def main() -> int:
    configure_logging("info")
    if sys.argv[1:] == ["spare"]:
        # what an engine with a model imports, while no settings have come
        import paceline.backends.loading.load  # noqa: F401
    return engine_main(build, shared)


if __name__ == "__main__":
    sys.exit(main())
