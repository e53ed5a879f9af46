"""A step timeline in the trace event format that Perfetto and chrome://tracing open.

One track per replica, one slice per step; written as it streams, so a long run needs no memory.
This module does not know the scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoints.private import private_opener
from paceline.core.errors import ConfigError

__all__ = ["StepEvent", "TimelineWriter"]


class StepEvent(NamedTuple):
    """One step of one replica."""

    replica: int
    # seconds on the run's clock
    start: float
    seconds: float
    # what was in it, for instance "2 prompts, 17 decodes"; the slice's title
    rows: str
    # shown when the slice is selected
    details: Mapping[str, int | float | str] = {}


class TimelineWriter:
    """Writes events as they come, in any order; a context manager, whose end makes the file whole.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = open(path, "w", encoding="utf-8", opener=private_opener)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error}") from error
        self._replicas: set[int] = set()
        self._separator = "\n"
        self.num_events = 0

    def __enter__(self) -> TimelineWriter:
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        return self

    def add(self, event: StepEvent) -> None:
        """Write one step."""
        if event.replica not in self._replicas:
            self._replicas.add(event.replica)
            self._write(_title(event.replica))
        self._write(_slice(event))
        self.num_events += 1

    def __exit__(self, *_: object) -> None:
        self._file.write("\n]}\n")
        self._file.close()

    def _write(self, value: dict[str, object]) -> None:
        self._file.write(self._separator + json.dumps(value))
        self._separator = ",\n"


def _title(replica: int) -> dict[str, object]:
    name = {"name": f"replica {replica}"}
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": replica, "args": name}


def _slice(event: StepEvent) -> dict[str, object]:
    """Times in the format are microseconds; three decimals keep them exact to a nanosecond."""
    return {
        "ph": "X",
        "name": event.rows,
        "pid": 0,
        "tid": event.replica,
        "ts": round(event.start * 1e6, 3),
        "dur": round(event.seconds * 1e6, 3),
        "args": dict(event.details),
    }
