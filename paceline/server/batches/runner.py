"""Answers the lines of all batches, as best-effort requests of the scheduler.

::

    validating --> in_progress --> finalizing --> completed
        |  '-----------|--- cancelling ---------> cancelled
        '-> failed     '------------------------> expired

Every step starts from the store's state and ends with a write to it, so a batch continues from the
point where another server left it. An answer counts once it is stored; a line without one is asked
again. While the disk is full or the engine is away, a batch pauses and tries again. Lines that ran
when the engine died are suspects: from then on each runs alone of its batch, and a line that was
there three times is given up, so that no line can kill engine after engine.

This module does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing, suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import BinaryIO, Concatenate, Final, ParamSpec, Protocol, TypeVar

from paceline.errors import EngineDeadError, EngineLostError
from paceline.http.errors import HttpError, Reply, error_body, reply_to
from paceline.server.batches.answering import URLS, answer_line, backoff
from paceline.server.batches.lines import (
    Answer,
    BatchLine,
    bounded_lines,
    find_faults,
    openai_record,
    read_lines,
    unanswered_record,
)
from paceline.server.batches.records import Batch, Result
from paceline.server.batches.store import BatchStore
from paceline.server.generation.service import Service
from paceline.server.protocol.responses import encode

__all__ = ["BatchRunner", "StoreCall"]

_log = logging.getLogger("paceline.server")

_P = ParamSpec("_P")
_R = TypeVar("_R")

# batches worked on at once; more take turns
_MAX_ACTIVE: Final = 16
# lines read from a file at once, and their bytes; the last line may exceed that
_AHEAD: Final = 32
_AHEAD_BYTES: Final = 64 * 2**10
# bytes of one batch's lines in flight, unless it is a single line; parsed, they take more
_MAX_BYTES: Final = 4 * 2**20
# seconds for which answers wait to be written together
_GATHER: Final = 0.01
# seconds without trouble after which the backoff starts again
_GOT_ON: Final = 60.0
# lines without an answer that are recorded at once
_CHUNK: Final = 500
# engine deaths after which a line that ran at each is given up
_MAX_DEATHS: Final = 3
_UNANSWERED: Final = {
    "expired": ("batch_expired", "the batch's completion window ended before this line was done"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was done"),
}


class StoreCall(Protocol):
    """Runs a method of the store off the event loop."""

    async def __call__(
        self,
        method: Callable[Concatenate[BatchStore, _P], _R],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R: ...


class BatchRunner:
    """Runs the batches of one store, on one event loop.

    Args:
        concurrency: lines of all batches that the engine works on at once.
        max_requests: maximum requests of one batch.
        max_line_bytes: maximum size of one line.
        clock: unix time in seconds.
    """

    def __init__(
        self,
        service: Service,
        call: StoreCall,
        *,
        concurrency: int,
        max_requests: int,
        max_line_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._service = service
        self._call = call
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._max_requests = max_requests
        self._max_line_bytes = max_line_bytes
        self._clock = clock
        # lines run in the batch class, whose targets stay, but best effort and without a queue
        # limit, even if the server's flags have changed that class
        classes = service.rules.slo_classes
        background = replace(classes["batch"], best_effort=True, queue_ttl=None)
        self._rules = replace(service.rules, slo_classes={**classes, "batch": background})
        self._recorder = _Recorder(call)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._active: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        # by batch: running lines, and those of them that ran when the engine died
        self._running: dict[str, set[int]] = {}
        self._struck: dict[str, set[int]] = {}
        # why a batch is paused, by its id
        self.troubles: dict[str, str] = {}

    def start(self) -> None:
        """Start to work on unfinished batches."""
        # an empty context: the request that happens to be the first must not lend its key's limits
        # or its trace
        self._task = asyncio.create_task(self._run(), name="batches", context=Context())
        self._wake.set()

    def wake(self) -> None:
        """Look for a new batch."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch whose status in the store is "cancelling"."""
        event = self._cancelled.get(batch_id)
        if event is not None:
            event.set()
        self._wake.set()

    async def stop(self) -> None:
        """Stop at once; the next server repeats the running lines."""
        tasks = [*self._active.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._recorder.idle()
        for batch_id in list(self._struck):
            await self._suspect(batch_id)

    async def _run(self) -> None:
        attempt = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                found = await self._call(BatchStore.unfinished, _MAX_ACTIVE)
            except Exception as error:
                self._report(error)
                await asyncio.sleep(backoff(attempt, 0.0, 0))
                attempt += 1
                self._wake.set()
                continue
            attempt = 0
            if len(found) == _MAX_ACTIVE:
                await self._make_way(found)
            for batch_id in found:
                if batch_id not in self._active and len(self._active) < _MAX_ACTIVE:
                    self._cancelled[batch_id] = asyncio.Event()
                    self._active[batch_id] = asyncio.create_task(self._work(batch_id))

    async def _make_way(self, found: list[str]) -> None:
        """Stop work on all other batches; it continues at their turn."""
        others = [task for batch_id, task in self._active.items() if batch_id not in found]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _work(self, batch_id: str) -> None:
        """Work on one batch until its end, with pauses."""
        attempt = 0
        cancelled = self._cancelled[batch_id]
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                try:
                    await self._advance(batch_id)
                    return
                except Exception as error:
                    self.troubles[batch_id] = self._report(error)
                    _log.warning("batch_paused id=%s reason=%r", batch_id, self.troubles[batch_id])
                    await self._suspect(batch_id)
                if loop.time() - began > _GOT_ON:
                    attempt = 0
                wait = backoff(attempt, 0.0, 0)
                if cancelled.is_set():
                    await asyncio.sleep(wait)
                else:
                    # a cancellation ends the pause
                    with suppress(TimeoutError):
                        await asyncio.wait_for(cancelled.wait(), wait)
                attempt += 1
        finally:
            self.troubles.pop(batch_id, None)
            self._running.pop(batch_id, None)
            del self._active[batch_id], self._cancelled[batch_id]
            self._wake.set()

    async def _suspect(self, batch_id: str) -> None:
        struck = self._struck.pop(batch_id, None)
        if struck:
            # if the write fails, the line is found again at the next death
            with suppress(HttpError):
                # shielded: cancelled while queued on the store's thread, the write would be lost
                await asyncio.shield(self._call(BatchStore.suspect, batch_id, struck))

    def _report(self, error: Exception) -> str:
        return reply_to(error, drain_timeout=self._service.config.drain_timeout).message

    async def _advance(self, batch_id: str) -> None:
        batch = await self._call(BatchStore.batch, batch_id)
        if batch.status == "validating":
            batch = await self._validate(batch)
        outcome = {"finalizing": "completed", "cancelling": "cancelled"}.get(batch.status)
        if batch.status == "in_progress":
            outcome = await self._answer(batch)
        if outcome is not None:
            if outcome in _UNANSWERED and batch.total:
                await self._give_up(batch, *_UNANSWERED[outcome])
            batch = await self._call(BatchStore.finish, batch.id, outcome, self._clock)
        _log.info(
            "batch id=%s status=%s total=%d completed=%d failed=%d seconds=%d",
            batch.id,
            batch.status,
            batch.total,
            batch.completed,
            batch.failed,
            self._clock() - batch.created_at,
        )

    async def _validate(self, batch: Batch) -> Batch:
        _, file = await self._call(BatchStore.open_file, batch.input_file_id, batch.owner)
        with closing(file):
            count, faults = await asyncio.to_thread(
                find_faults, self._lines(file), batch.endpoint, self._max_requests
            )
        if faults:
            return await self._call(BatchStore.fail, batch.id, faults, self._clock())
        return await self._call(BatchStore.begin, batch.id, count, self._clock())

    def _lines(self, file: BinaryIO) -> Iterator[BatchLine]:
        lines = bounded_lines(file, self._max_line_bytes)
        bounds = self._service.config.bounds
        return read_lines(lines, URLS, max_bytes=self._max_line_bytes, bounds=bounds)

    async def _answer(self, batch: Batch) -> str:
        """Answer the lines without an answer; return how that ended."""
        cancelled = self._cancelled[batch.id]
        feeding = asyncio.create_task(self._feed(batch))
        cancelling = asyncio.create_task(cancelled.wait())
        try:
            left = max(0.0, batch.expires_at - self._clock())
            await asyncio.wait(
                (feeding, cancelling), timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if feeding.done():
                await feeding
                return "completed"
            return "cancelled" if cancelled.is_set() else "expired"
        finally:
            cancelling.cancel()
            feeding.cancel()
            await asyncio.gather(feeding, cancelling, return_exceptions=True)
            # answers already on their way to the disk count
            await self._recorder.idle()

    async def _feed(self, batch: Batch) -> None:
        load = _Load(self._concurrency, _MAX_BYTES)
        try:
            async with asyncio.TaskGroup() as tasks, aclosing(self._unanswered(batch)) as lines:
                async for line in lines:
                    if line.index in batch.suspects:
                        await self._one(batch, line)
                        continue
                    await load.take(line.size)
                    task = tasks.create_task(self._one(batch, line))
                    # a task that is cancelled before it starts would not release its share
                    task.add_done_callback(partial(load.give, line.size))
        except ExceptionGroup as group:
            # one task failed, and the others were cancelled because of it
            raise group.exceptions[0] from None

    async def _unanswered(self, batch: Batch) -> AsyncGenerator[BatchLine, None]:
        """Yield the lines without a record."""
        answered = await self._call(BatchStore.answered, batch.id)
        _, file = await self._call(BatchStore.open_file, batch.input_file_id, batch.owner)
        with closing(file):
            left = (line for line in self._lines(file) if line.index not in answered)
            while lines := await asyncio.to_thread(_take, left):
                for line in lines:
                    yield line

    async def _one(self, batch: Batch, line: BatchLine) -> None:
        request_id = f"{batch.id}-{line.index}"
        if batch.suspects.get(line.index, 0) >= _MAX_DEATHS:
            message = f"the engine died {_MAX_DEATHS} times while this line ran"
            answer = Answer(500, error_body(Reply(500, message)), request_id)
        else:
            answer = await self._ask(batch, line, request_id)
        record = encode(openai_record(line, _record_id(batch, line), answer))
        await self._recorder.put(Result(batch.id, line.index, answer.status != 200, record))
        # the batch makes progress
        self.troubles.pop(batch.id, None)

    async def _ask(self, batch: Batch, line: BatchLine, request_id: str) -> Answer:
        if self._service.limiter is not None:
            self._service.limiter.charge_batches(batch.owner)
        asked = replace(line, body={**line.body, "slo": "batch"})
        return await answer_line(
            self._service,
            asked,
            request_id,
            owner=batch.owner,
            rules=self._rules,
            around=lambda: self._on_engine(batch, line),
        )

    @asynccontextmanager
    async def _on_engine(self, batch: Batch, line: BatchLine) -> AsyncGenerator[None, None]:
        """Hold a slot of the engine, and list the line as running there."""
        async with self._room:
            running = self._running.setdefault(batch.id, set())
            # an engine that is being replaced keeps the line until the next is ready; this line did
            # not cause that loss
            with suppress(EngineLostError):
                self._service.check_health()
                running.add(line.index)
            try:
                yield
            except (EngineDeadError, EngineLostError) as error:
                # the other lines get the error as well, or are cancelled first
                self._struck.setdefault(batch.id, set()).update(running)
                # raised, so that the batch pauses: a line that retried itself would be no suspect
                raise EngineDeadError(str(error)) from error
            finally:
                running.discard(line.index)

    async def _give_up(self, batch: Batch, code: str, message: str) -> None:
        """Record the given error for every line without a record."""
        results: list[Result] = []
        async with aclosing(self._unanswered(batch)) as lines:
            async for line in lines:
                record = unanswered_record(line, _record_id(batch, line), code, message)
                results.append(Result(batch.id, line.index, True, record))
                if len(results) == _CHUNK:
                    await self._call(BatchStore.record, results)
                    results = []
        if results:
            await self._call(BatchStore.record, results)


class _Load:
    """The lines of one batch in flight: bounded in number and bytes; a single one always fits."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._lines = self._bytes = 0
        self._less = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait for capacity and add a line; only one task may call this."""
        while self._lines and (
            self._lines >= self._max_lines or self._bytes + size > self._max_bytes
        ):
            self._less.clear()
            await self._less.wait()
        self._lines += 1
        self._bytes += size

    def give(self, size: int, _: object = None) -> None:
        """Remove a line that is done."""
        self._lines -= 1
        self._bytes -= size
        self._less.set()


class _Recorder:
    """Writes records; those that arrive together share one transaction."""

    def __init__(self, call: StoreCall) -> None:
        self._call = call
        self._waiting: list[Result] = []
        self._writing: asyncio.Task[None] | None = None
        self._last: asyncio.Task[None] | None = None

    async def put(self, result: Result) -> None:
        """Write a record; return once it is on disk. Raises StorageError."""
        self._waiting.append(result)
        if self._writing is None:
            self._writing = self._last = asyncio.create_task(self._write())
        await asyncio.shield(self._writing)

    async def idle(self) -> None:
        """Wait until every record is on disk, or failed."""
        if self._last is not None:
            await asyncio.gather(self._last, return_exceptions=True)

    async def _write(self) -> None:
        await asyncio.sleep(_GATHER)
        results, self._waiting, self._writing = self._waiting, [], None
        await self._call(BatchStore.record, results)


def _take(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """Return the next lines; none at the end."""
    taken: list[BatchLine] = []
    size = 0
    for line in lines:
        taken.append(line)
        size += line.size
        if len(taken) == _AHEAD or size >= _AHEAD_BYTES:
            break
    return taken


def _record_id(batch: Batch, line: BatchLine) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{line.index}"
