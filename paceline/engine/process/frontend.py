"""The part of an engine client that does not depend on where the engine lives.

::

    generate() --Add--> engine --Outputs--> OutputProcessor --> _Stream --> generate()

A stream holds what its reader has not taken yet. A slow reader gets several deltas merged into one,
so it costs only the memory of its text, and it never slows the engine or other readers. A waiting
reader may be spared the wake-up: its sink (``protocol.Sink``) is called first.

Everything here runs on one event loop. Subclasses carry messages: ``_send`` out, ``_receive`` in.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Final

from paceline.engine.process.messages import (
    Abort,
    Add,
    ClientMessage,
    Dead,
    EngineMessage,
    LoadAdapter,
    Outputs,
    Refused,
    TimelineNews,
    UnloadAdapter,
)
from paceline.engine.protocol import Sink, Tokenizer
from paceline.engine.text.output_processor import OutputProcessor, merge_outputs
from paceline.engine.types import (
    AdapterStatus,
    EngineFaults,
    EngineInfo,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    Resume,
)
from paceline.errors import EngineDeadError, EngineDrainingError, InvalidRequestError

__all__ = ["EngineFrontend", "happens_within"]

# outputs that a stream holds before it merges them
_UNREAD: Final = 32
# seconds of silence that are normal for an idle engine
_QUIET: Final = 2.5
# seconds for aborted requests to deliver their last delta
_ABORT_GRACE: Final = 5.0


class _Stream:
    """Outputs of one request between the engine and its reader."""

    def __init__(self, sink: Sink | None, num_output_tokens: int) -> None:
        self._sink = sink
        self._unread: list[GenerationOutput] = []
        self._error: Exception | None = None
        # the one reader's future, while it waits
        self._waiting: asyncio.Future[None] | None = None
        # whether something was read: the sink is not called before
        self._begun = False
        # output tokens of all choices, read or not
        self.num_output_tokens = num_output_tokens

    def put(self, output: GenerationOutput) -> None:
        if self._error is not None:
            # otherwise the reader would get later output, or the end, without noticing the gap
            return
        self.num_output_tokens = output.num_output_tokens
        waiting = self._waiting
        if (
            self._sink is not None
            and self._begun
            # the reader has not been woken, so there is nothing unread and no error
            and waiting is not None
            and not waiting.done()
            and not output.finished
        ):
            try:
                if self._sink(output):
                    return
            except Exception as error:
                self.fail(error)
                return
        self._unread.append(output)
        if len(self._unread) >= _UNREAD:
            self._unread = [merge_outputs(self._unread)]
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream; unread output is still read first. The first error counts."""
        if self._error is None:
            self._error = error
        self._wake()

    async def get(self) -> GenerationOutput:
        """Return everything unread as one output; wait if there is nothing."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self._begun = True
        output = merge_outputs(self._unread)
        self._unread.clear()
        return output

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class EngineFrontend(abc.ABC):
    """An ``EngineClient`` without its transport.

    Args:
        stall_timeout: seconds without a completed step while requests are unfinished, or without
            any message at all, after which ``check_health`` raises.
    """

    # called once, on the event loop, when the engine has ended without having been closed
    on_dead: Callable[[EngineDeadError], None] | None = None
    # called on the event loop for every snapshot; ``stats`` alone would miss step counts
    on_stats: Callable[[EngineStats], None] | None = None
    # called on the event loop with frames of ``engine.timeline``; None: the engine has ended
    on_timeline: Callable[[bytes | None], None] | None = None

    def __init__(self, tokenizer: Tokenizer, stats: EngineStats, stall_timeout: float) -> None:
        self._tokenizer = tokenizer
        self._stats = stats
        self._stall_timeout = stall_timeout
        self._processor = OutputProcessor(tokenizer)
        self._streams: dict[str, _Stream] = {}
        self._draining = False
        # reason why nothing more comes from the engine
        self._dead: str | None = None
        # output so far of unfinished requests at the engine's end, for another engine
        self._resumes: dict[str, Resume] = {}
        # latest news of each adapter, and those who wait for the first of one
        self.adapters: dict[str, AdapterStatus] = {}
        self._loads: dict[str, asyncio.Future[AdapterStatus]] = {}
        now = time.monotonic()
        # time of the last message, and of the last progress (or beginning) of work
        self._heard_at = now
        self._progress_at = now
        # set while no request is unfinished
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------------ EngineClient

    @property
    @abc.abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def faults(self) -> EngineFaults:
        return EngineFaults(up=self._dead is None)

    @property
    def num_unfinished(self) -> int:
        """Requests accepted and not ended."""
        return self._processor.num_unfinished

    def num_output_tokens(self, request_id: str) -> int:
        """Return the output tokens so far of a running request; 0 for an unknown one."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else stream.num_output_tokens

    def take_resume(self, request_id: str) -> Resume | None:
        """Return, once, the output of a request that the engine's end cut short, for another engine
        to continue; its reader gets all of it before the error. None if it had ended."""
        return self._resumes.pop(request_id, None)

    async def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Yield deltas as ``EngineClient.generate`` does. Leave it by ``aclose`` or a cancelled
        task, and the engine stops working on the request at once."""
        self._raise_if_dead()
        if self._draining:
            raise EngineDrainingError("the server is shutting down and takes no new requests")
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        self._processor.add(request)
        resumed = 0 if request.resume is None else request.resume.num_output_tokens
        stream = self._streams[request.request_id] = _Stream(sink, resumed)
        if self._idle.is_set():
            self._idle.clear()
            self._progress_at = time.monotonic()
        try:
            self._send(Add(request))
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[request.request_id]
            self._abort(self._processor.discard(request.request_id))
            self._note_idle()

    async def abort(self, request_id: str) -> None:
        self._abort(self._processor.unfinished_choices(request_id))

    async def load_adapter(self, key: str, path: str, *, pinned: bool = False) -> AdapterStatus:
        """Check and load an adapter; return once it is resident, or has failed. ``key`` was not
        used before. Raises EngineDeadError if the engine ends meanwhile."""
        self.register_adapter(key, path, pinned=pinned)
        done: asyncio.Future[AdapterStatus] = asyncio.get_running_loop().create_future()
        self._loads[key] = done
        try:
            return await done
        finally:
            self._loads.pop(key, None)

    def register_adapter(
        self, key: str, path: str, digest: str = "", *, pinned: bool = False
    ) -> None:
        """Begin to load an adapter; requests that name it wait for it. ``digest`` and ``pinned``:
        see ``AdapterStore.register``."""
        self._raise_if_dead()
        self._send(LoadAdapter(key, path, digest, pinned))

    def unload_adapter(self, key: str) -> None:
        """Forget an adapter; requests that use it go on."""
        if self._dead is None:
            self._send(UnloadAdapter(key))

    def check_health(self) -> None:
        self._raise_if_dead()
        now = time.monotonic()
        silent = now - self._heard_at
        # an idle engine sends a message once a second
        limit = self._stall_timeout if self.num_unfinished else max(self._stall_timeout, _QUIET)
        if silent > limit:
            raise EngineDeadError(
                f"the engine has sent nothing for {silent:.1f} s (limit {limit:.1f} s)"
            )
        stalled = now - self._progress_at
        if self.num_unfinished and stalled > self._stall_timeout:
            raise EngineDeadError(
                f"no step has completed for {stalled:.1f} s (limit {self._stall_timeout:.1f} s) "
                f"with {self.num_unfinished} unfinished requests"
            )

    async def drain(self, timeout: float) -> None:
        self._draining = True
        if await happens_within(self._idle, timeout):
            return
        for request_id in tuple(self._streams):
            await self.abort(request_id)
        await happens_within(self._idle, _ABORT_GRACE)

    @abc.abstractmethod
    async def close(self) -> None: ...

    def forgive(self, seconds: float) -> None:
        """Ignore the engine's silence of ``seconds`` in which this process itself stood still."""
        self._heard_at += seconds
        self._progress_at += seconds

    # ------------------------------------------------------------------ for subclasses

    @abc.abstractmethod
    def _send(self, message: ClientMessage) -> None:
        """Send a message to the engine; never waits."""

    def _receive(self, message: EngineMessage) -> None:
        """Handle one message of the engine's."""
        now = time.monotonic()
        self._heard_at = now
        if isinstance(message, Outputs):
            if message.stats.num_steps > self._stats.num_steps:
                self._progress_at = now
            self._stats = message.stats
            if self.on_stats is not None:
                self.on_stats(message.stats)
            if message.updates:
                self._deliver(message, now)
        elif isinstance(message, AdapterStatus):
            self._note_adapter(message)
        elif isinstance(message, TimelineNews):
            if self.on_timeline is not None:
                self.on_timeline(message.frames)
        elif isinstance(message, Refused):
            live = self._processor.discard(message.request_id)
            if len(live) > 1:
                # if the first choice has failed, others may have been started
                self._abort(live)
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.fail(message.error())
            self._note_idle()
        elif isinstance(message, Dead):
            self._die(message.message)

    def _die(self, reason: str) -> None:
        """Fail all unfinished requests with EngineDeadError. Only the first reason counts."""
        if self._dead is not None:
            return
        self._dead = reason
        for load in self._loads.values():
            if not load.done():
                load.set_exception(EngineDeadError(reason))
        for request_id, stream in self._streams.items():
            if self._processor.unfinished_choices(request_id):
                self._resumes[request_id] = self._processor.resume(request_id)
            self._processor.discard(request_id)
            stream.fail(EngineDeadError(reason))
        self._note_idle()
        if self.on_timeline is not None:
            self.on_timeline(None)
        if self.on_dead is not None:
            self.on_dead(EngineDeadError(reason))

    # ------------------------------------------------------------------ inside

    def _note_adapter(self, status: AdapterStatus) -> None:
        if status.status == "gone":
            self.adapters.pop(status.key, None)
            return
        self.adapters[status.key] = status
        waiting = self._loads.get(status.key)
        if waiting is not None and not waiting.done():
            waiting.set_result(status)

    def _deliver(self, message: Outputs, now: float) -> None:
        self._processor.note_prompt_logprobs(message.prompt_logprobs)
        self._processor.note_pooled(message.pooled)
        processed = self._processor.process(message.updates, now)
        self._abort(processed.stopped, stopped=True)
        self._abort(processed.failed)
        for output in processed.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
        self._note_idle()

    def _abort(self, ids: tuple[str, ...], *, stopped: bool = False) -> None:
        if ids and self._dead is None:
            self._send(Abort(ids, stopped))

    def _note_idle(self) -> None:
        if not self._processor.num_unfinished:
            self._idle.set()

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)


async def happens_within(event: asyncio.Event, timeout: float) -> bool:
    """Whether ``event`` is set within ``timeout`` seconds; returns as soon as it is."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
