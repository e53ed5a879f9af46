"""Recording of an engine's steps and requests to a file while it runs.

One JSON object a line. The first is a header, the last counts the dropped records::

    {"paceline_recording": 1, "scheduler": {...}, "cache": {...}, "pipeline_depth": 2}
    {"step": 7, "planned": 3.1, "done": 3.2, "seconds": 0.08,
     "rows": [[start, tokens], ...], "narrow": [rows, keys, longest], "samples": 5}
    {"request": "id/0", "arrival": 2.9, "taken": 3.0, "scheduled": 3.1, "first_token": 3.2,
     "last_token": 4.0, "prompt_tokens": 512, "output_tokens": 64, "cached_tokens": 0,
     "preemptions": 0, "end": "length", "max_tokens": 64, "slo": {...}, "tenant": "", "priority": 0}
    {"end": true, "steps": 900, "requests": 40, "dropped": 0}

Times are seconds of the engine's clock. ``rows`` lists rows of several tokens; rows of one token
are counted, with the sum and the maximum of the positions before them. A step with adapters has
``"adapters": [bytes, products]``, and a request with one ``"adapter"``, a name for its contents.
The step loop only puts references on a bounded queue; a thread formats and writes. When the queue
is full a record is dropped, and counted.

This module does not know models or HTTP.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TextIO

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepNote
from paceline.core.request import Request
from paceline.errors import ConfigError
from paceline.files import private_opener

__all__ = ["RECORDING_VERSION", "FileRecorder", "Recorder", "Recorders"]

RECORDING_VERSION: Final = 1
# most records that wait for the writer; a step is one
_CAPACITY: Final = 10_000
_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Receives the events of ``EngineCore``. Must not block or raise."""

    def added(self, request: Request, now: float) -> None:
        """Note a queued request."""

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        """Note a plan, passed to the backend next; requests are as the plan left them."""

    def stepped(
        self,
        plan: SchedulerOutput,
        planned: float,
        done: float,
        seconds: float,
        updates: Sequence[RequestUpdate],
    ) -> None:
        """Note a step's result, already applied. ``seconds``: the backend's measurement."""

    def ended(self, request_ids: Sequence[str], now: float) -> None:
        """Note requests that ended outside a step: aborted, or dropped before they were started.
        Some may have ended before."""

    def close(self) -> None:
        """End; no event follows. Idempotent."""


class Recorders:
    """Several recorders as one, called in order."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def added(self, request: Request, now: float) -> None:
        for each in self._recorders:
            each.added(request, now)

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        for each in self._recorders:
            each.planned(plan, now, note)

    def stepped(
        self,
        plan: SchedulerOutput,
        planned: float,
        done: float,
        seconds: float,
        updates: Sequence[RequestUpdate],
    ) -> None:
        for each in self._recorders:
            each.stepped(plan, planned, done, seconds, updates)

    def ended(self, request_ids: Sequence[str], now: float) -> None:
        for each in self._recorders:
            each.ended(request_ids, now)

    def close(self) -> None:
        for each in self._recorders:
            each.close()


class _Added(NamedTuple):
    request: Request
    now: float


class _Stepped(NamedTuple):
    plan: SchedulerOutput
    planned: float
    done: float
    seconds: float
    updates: Sequence[RequestUpdate]


class _Ended(NamedTuple):
    request_ids: Sequence[str]
    now: float


class FileRecorder:
    """Writes to its own file, replacing an existing one.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        pipeline_depth: int,
        *,
        capacity: int = _CAPACITY,
    ) -> None:
        try:
            self._file: TextIO = open(path, "w", opener=private_opener)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--record: cannot write {path}: {error}") from error
        header = {
            "paceline_recording": RECORDING_VERSION,
            "scheduler": asdict(scheduler),
            "cache": asdict(cache),
            "pipeline_depth": pipeline_depth,
        }
        self._write(header)
        self._queue: queue.Queue[_Added | _Stepped | _Ended | None] = queue.Queue(capacity)
        self.num_dropped = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def added(self, request: Request, now: float) -> None:
        self._put(_Added(request, now))

    def planned(self, plan: SchedulerOutput, now: float, note: StepNote) -> None:
        """Do nothing: a step is written once it has ended."""

    def stepped(
        self,
        plan: SchedulerOutput,
        planned: float,
        done: float,
        seconds: float,
        updates: Sequence[RequestUpdate],
    ) -> None:
        self._put(_Stepped(plan, planned, done, seconds, updates))

    def ended(self, request_ids: Sequence[str], now: float) -> None:
        self._put(_Ended(tuple(request_ids), now))

    def close(self) -> None:
        """Write the queued records, and the last line."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _put(self, record: _Added | _Stepped | _Ended) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    # ------------------------------------------------------------------ the writer's thread

    def _run(self) -> None:
        open_requests: dict[str, _Added] = {}
        steps = requests = 0
        try:
            with self._file:
                while (record := self._queue.get()) is not None:
                    if isinstance(record, _Added):
                        open_requests[record.request.request_id] = record
                        continue
                    if isinstance(record, _Stepped):
                        self._write(_step(record, open_requests))
                        steps += 1
                        now = record.done
                        ended = [u.request_id for u in record.updates if u.finish_reason]
                    else:
                        now, ended = record.now, list(record.request_ids)
                    for request_id in ended:
                        added = open_requests.pop(request_id, None)
                        if added is not None:
                            self._write(_request(added, now))
                            requests += 1
                    if self._queue.empty():
                        self._file.flush()
                self._write(
                    {
                        "end": True,
                        "steps": steps,
                        "requests": requests,
                        "dropped": self.num_dropped,
                    }
                )
        except OSError as error:
            # the disk is full or gone: serving goes on
            _log.error("recording stopped: %s", error)
            self._drain()

    def _drain(self) -> None:
        while self._queue.get() is not None:
            self.num_dropped += 1

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _step(record: _Stepped, requests: Mapping[str, _Added]) -> dict[str, Any]:
    wide = []
    sizes: dict[int, int] = {}
    products = 0
    rows = keys = longest = samples = 0
    for request_id, start, num_tokens, _, sampled in record.plan.rows:
        samples += sampled
        if (added := requests.get(request_id)) and (use := added.request.asked.adapter):
            sizes[use.slot] = use.num_bytes
            products += use.num_products * num_tokens
        if num_tokens == 1:
            rows += 1
            keys += start
            longest = max(longest, start)
        else:
            wide.append((start, num_tokens))
    return {
        "step": record.plan.step_id,
        "planned": record.planned,
        "done": record.done,
        "seconds": record.seconds,
        "rows": wide,
        "narrow": (rows, keys, longest),
        "samples": samples,
    } | ({"adapters": (sum(sizes.values()), products)} if sizes else {})


def _request(added: _Added, now: float) -> dict[str, Any]:
    request = added.request
    reason = request.finish_reason
    return {
        "request": request.request_id,
        "arrival": request.asked.arrival_time,
        "taken": added.now,
        "scheduled": request.first_scheduled_time,
        "first_token": request.first_token_time,
        "last_token": now,
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": len(request.output_token_ids),
        "cached_tokens": request.num_cached_tokens,
        "preemptions": request.num_preemptions,
        "end": None if reason is None else reason.value,
        "max_tokens": request.asked.sampling.max_tokens,
        "slo": asdict(request.asked.slo),
        "tenant": request.asked.tenant,
        "priority": request.asked.priority,
    } | ({} if request.asked.adapter is None else {"adapter": request.asked.adapter.key.hex()[:16]})
