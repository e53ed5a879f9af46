"""Timelines in the trace event format that Perfetto and chrome://tracing open.

``TimelineWriter`` writes only steps, one track per replica, as they stream, so a long run needs no
memory. ``trace_of`` writes all that a ``Model`` has rebuilt::

    process 1    a slice a step
    process 2    a thread a lane, a slice for each run of one state; arrows from where a request was
                 preempted to where it went on
    process 3    counters: tokens and budget, predicted and measured time, waiting, free blocks

The page writes the same (``timeline/chrome.js``), and both are held to ``tests/ui/vectors``.
Viewers fail with too many slices, so their number is bounded; the file says how many were left out.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceline.core.queues.wait_clocks import REASONS
from paceline.errors import ConfigError
from paceline.files import private_opener
from paceline.timeline.events import State
from paceline.timeline.model import Seen, Span, Step

__all__ = ["MOST_SLICES", "StepEvent", "TimelineWriter", "trace_of", "write_trace"]

MOST_SLICES: Final = 200_000
_RUNS: Final = (State.CHUNK, State.DECODE, State.SKIPPED)
_PAUSES: Final = (State.PREEMPTED, State.SWAPPED)
_NAMES: Final = {State.CHUNK: "prompt", State.DECODE: "tokens", State.SKIPPED: "nothing"}


class StepEvent(NamedTuple):
    """One step of one replica."""

    replica: int
    # seconds on the run's clock
    start: float
    seconds: float
    # its rows, for instance "2 prompts, 17 decodes"; the slice's title
    rows: str
    # shown when the slice is selected
    details: Mapping[str, int | float | str] = {}


class TimelineWriter:
    """Writes events as they come, in any order; a context manager that completes the file on exit.

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
    """Make a slice. The format's times are microseconds; three decimals keep nanoseconds exact."""
    return {
        "ph": "X",
        "name": event.rows,
        "pid": 0,
        "tid": event.replica,
        "ts": round(event.start * 1e6, 3),
        "dur": round(event.seconds * 1e6, 3),
        "args": dict(event.details),
    }


def trace_of(
    steps: Sequence[Step], seen: Iterable[Seen], *, now: float, most: int = MOST_SLICES
) -> dict[str, Any]:
    """Return a trace of steps with results and of requests, ended or not; the newest of them if
    they are too many.

    Args:
        now: end of the spans of requests that have not ended; seconds of the engine's clock.
    """
    slices = sorted(
        ((span, one, index) for one in seen for index, span in enumerate(_spans(one, now))),
        key=lambda entry: (entry[0].start, entry[1].number, entry[2]),
    )
    slices = [entry for entry in slices if entry[0].state in _RUNS]
    left_out = max(0, len(slices) + len(steps) - most)
    if left_out:
        kept_steps = min(len(steps), most // 2)
        steps = steps[len(steps) - kept_steps :]
        slices = slices[max(0, len(slices) - (most - kept_steps)) :]
    starts = [step.start for step in steps[:1]] + [entry[0].start for entry in slices[:1]]
    zero = min(starts, default=0.0)
    events: list[dict[str, Any]] = [
        _named(1, None, "steps"),
        _named(2, None, "requests by lane"),
        _named(3, None, "counters"),
    ]
    for lane in sorted({entry[0].lane for entry in slices}):
        events.append(_named(2, lane, f"lane {lane}"))
        order = {"sort_index": lane}
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": 2, "tid": lane, "args": order}
        )
    for step in steps:
        events += _of_step(step, zero)
    for span, one, index in slices:
        events += _of_span(span, one, index, zero)
    other = {"paceline_timeline": 1, "left_out": left_out, "zero_seconds": zero}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace to a file, compressed if the name ends in .gz.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = json.dumps(trace, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    try:
        with open(path, "wb", opener=private_opener) as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error


def _spans(seen: Seen, now: float) -> list[Span]:
    spans = list(seen.spans)
    if seen.ended is None and now > seen.since:
        spans.append(Span(seen.state, seen.since, now, seen.lane, seen.steps, seen.tokens))
    return spans


def _named(pid: int, tid: int | None, name: str) -> dict[str, Any]:
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid or 0, "args": {"name": name}}


def _of_step(step: Step, zero: float) -> list[dict[str, Any]]:
    plan, done = step.plan, step.done
    assert done is not None, "its result came"
    at = _us(step.start - zero)
    blocked_by = REASONS[plan.blocked_by] if plan.blocked_by < len(REASONS) else ""
    args = {
        "step": plan.step,
        "tokens": plan.tokens,
        "budget": plan.budget,
        "written or drafted": plan.narrow,
        "chunks": plan.wide,
        "predicted ms": _milli(plan.predicted),
        "backend ms": _milli(done.backend),
        "waiting": plan.waiting,
        "blocked by": blocked_by,
        "steps summed": plan.merged,
    }
    counters = {
        "tokens": {"tokens": plan.tokens, "budget": plan.budget},
        "milliseconds": {
            "predicted": _milli(plan.predicted),
            "measured": _milli(done.done - step.start),
        },
        "waiting": {"requests": plan.waiting},
        "free blocks": {"blocks": plan.free_blocks},
        "pressure": {"level": plan.pressure},
    }
    took = _us(done.done - step.start)
    head = {"ph": "X", "name": f"{plan.tokens} tokens", "pid": 1, "tid": 0, "ts": at, "dur": took}
    return [
        head | {"args": args},
        *(
            {"ph": "C", "name": name, "pid": 3, "tid": 0, "ts": at, "args": values}
            for name, values in counters.items()
        ),
    ]


def _of_span(span: Span, seen: Seen, index: int, zero: float) -> list[dict[str, Any]]:
    told = seen.told
    name = f"request {seen.number}" if told is None else told.request_id
    args: dict[str, Any] = {"request": name, "state": span.state.name.lower()}
    if told is not None:
        args |= {"class": told.slo_class, "tenant": told.tenant}
    args |= {"steps": span.steps, "tokens": span.tokens}
    place = {"pid": 2, "tid": span.lane}
    title = f"{_NAMES[span.state]} {name}"
    start, end = _us(span.start - zero), _us(span.end - zero)
    found: list[dict[str, Any]] = [
        {"ph": "X", "name": title, **place, "ts": start, "dur": _round(end - start), "args": args}
    ]
    flow = {"cat": "preemption", "name": "preempted", **place}
    before = seen.spans[index - 1].state if index else None
    after = seen.spans[index + 1].state if index + 1 < len(seen.spans) else None
    if seen.ended is None and index + 1 == len(seen.spans):
        after = seen.state
    if before in _PAUSES:
        # the id of the arrow that began where it was preempted
        number = seen.number * 1000 + index - 1
        found.append({"ph": "f", "bp": "e", "id": number, **flow, "ts": start})
    if after in _PAUSES:
        found.append({"ph": "s", "id": seen.number * 1000 + index + 1, **flow, "ts": end})
    return found


def _us(seconds: float) -> float:
    return _round(seconds * 1e6)


def _milli(seconds: float) -> float:
    return _round(seconds * 1e3)


def _round(value: float) -> float:
    """Round to three decimals, half of the last upwards, as the page does."""
    return math.floor(value * 1e3 + 0.5) / 1e3
