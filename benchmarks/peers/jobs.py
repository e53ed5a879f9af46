"""A worker's end of the pipe: jobs in, seconds out, one JSON object per line.

The worker loads its engine, writes ``{"ready": ...}``, and answers each job
``{"prompts": [[ids]], "max_tokens": n, "shared": n}`` with ``{"seconds": s, "output_tokens": n}``
or ``{"error": text}``. Requests of a job arrive together, are greedy, and end after exactly
``max_tokens`` for any tokens. The first ``shared`` ids are the same in all prompts of a job.

All output of the engine goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Done", "Engine", "Job", "serve"]


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that arrive together."""

    prompts: list[list[int]]
    # output tokens of each
    max_tokens: int
    # ids at the start that all prompts have in common
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """A job's outcome."""

    # from the first request's arrival to the last token, without conversions of the prompts
    seconds: float
    output_tokens: int


class Engine(Protocol):
    """A loaded engine."""

    def run(self, job: Job) -> Done: ...


def serve(load: Callable[[], tuple[Engine, dict[str, Any]]]) -> None:
    """Load, then answer jobs until standard input ends.

    Args:
        load: returns the engine, and facts about it for the report (version, precision).
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        engine, about = load()
    except Exception:
        answer({"error": traceback.format_exc()})
        sys.exit(1)
    answer({"ready": about})
    for line in sys.stdin:
        try:
            done = engine.run(Job(**json.loads(line)))
        except Exception:
            answer({"error": traceback.format_exc()})
        else:
            answer({"seconds": done.seconds, "output_tokens": done.output_tokens})
