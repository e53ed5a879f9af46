"""The engine process's entry: ``python -m paceline.cli.serve.engine_process``, started by a client.

Its settings arrive as JSON on standard input; ``engine.process`` does the rest. With the argument
``forks`` it does the imports of engines once, and is forked for each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from paceline.backends.machine.cpu import trim_heap
from paceline.backends.machine.yielding import lower_all
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.serve.startup import Stages, process_age
from paceline.cli.terminal.logs import configure_logging
from paceline.cli.wiring import build_core
from paceline.engine.core import EngineCore
from paceline.engine.process.process import engine_main
from paceline.engine.types import EngineInfo
from paceline.errors import ConfigError

__all__ = ["build", "main"]

_log = logging.getLogger("paceline.cli")


def build(config: bytes) -> tuple[EngineCore, EngineInfo]:
    """Build an engine from the bytes of ``EngineSettings.to_json``."""
    stages = Stages(process_age(), time.monotonic())
    settings = EngineSettings.from_json(config)
    configure_logging(settings.log_level, settings.log_format)
    if settings.cpus is not None:
        # before any thread that computes: those inherit it, and count these processors
        os.sched_setaffinity(0, settings.cpus)
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


def ending(config: bytes) -> None:
    """Yield to other engines of this server that compute while this one's memory is freed. Where
    none does, programs that are no engines could keep a process of low priority from its end."""
    if (turn := EngineSettings.from_json(config).turn) is not None:
        from paceline.engine.models.loading import Loading

        # where the server has ended, too, the page may be gone
        with contextlib.suppress(OSError, ConfigError):
            # until this process has ended
            loading = Loading(Path(turn))
            if loading.is_crowded(but=os.getpid()):
                lower_all()


def main() -> int:
    configure_logging("info")
    # also of engines that are forked from here
    client = os.getppid()
    if sys.argv[1:] == ["forks"]:
        # what an engine with a model imports, and its library, which was checked
        import paceline.backends.loading.load
        import paceline.checkpoints.hub.resolve
        import paceline.engine.blocks.opening
        import paceline.engine.models.turn
        import paceline.engine.text.grammar  # noqa: F401
        from paceline.backends.native import unavailable_reason
        from paceline.backends.native.library import digest
        from paceline.engine.process.forks import is_forked

        if unavailable_reason() is None:
            digest()
        if not is_forked():
            return 0
    return engine_main(build, shared, ending, client)


if __name__ == "__main__":
    sys.exit(main())
