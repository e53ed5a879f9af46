"""A step timeline in the trace event format that Perfetto and chrome://tracing open.

One track per replica, one slice per step; written as it streams, so a long run needs no memory.
This module does not know the scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ConfigError

__all__ = ["StepEvent", "write_timeline"]


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


def write_timeline(path: Path, events: Iterable[StepEvent]) -> int:
    """Write ``events``, in any order, to ``path``; returns how many.

    Raises:
        ConfigError: the file cannot be written.
    """
    seen: set[int] = set()
    number = 0
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            separator = "\n"
            for event in events:
                if event.replica not in seen:
                    seen.add(event.replica)
                    file.write(separator + json.dumps(_title(event.replica)))
                    separator = ",\n"
                file.write(separator + json.dumps(_slice(event)))
                number += 1
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    return number


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
