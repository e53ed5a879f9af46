"""An engine process that is replaced when it ends or hangs.

::

    generate() --> the engine of the moment --> deltas
                        |  it ended, it stands still, it was stopped
                        v
         killed, another one started     sent there with its output so far, and goes on after it
                                         it ended by this request: PoisonedRequestError
                                         it ended too often: EngineLostError

Requests that the engine was computing when it ended are suspects, and enter the next one by the
rules of ``quarantine``: if an engine ends again, one of them is found guilty, and the others are
tried on. Other requests do not wait for that.

Restarts are bounded: after more than ``max_restarts`` within ``window`` seconds, the engine counts
as dead. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Final

import msgspec

from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.process.frontend import happens_within
from paceline.engine.process.in_flight import LOADING
from paceline.engine.protocol import Sink, Tokenizer
from paceline.engine.supervision.quarantine import Place, Quarantine, Suspect, find_guilty
from paceline.engine.supervision.restarts import DeadlyLoads, Restarts, watch
from paceline.engine.supervision.supervised import (
    Aborted,
    Call,
    Counts,
    Engine,
    KnownAdapter,
    aborted_output,
    added,
    fail_wait,
    for_the_next,
)
from paceline.engine.types import (
    AdapterStatus,
    EngineFaults,
    EngineInfo,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
)
from paceline.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineLostError,
    InvalidRequestError,
    PacelineError,
    PoisonedRequestError,
)

__all__ = ["Starter", "SupervisedEngineClient"]

_log = logging.getLogger(__name__)

# starts an engine; arguments are the one before it, if any, and the number of engines so far
Starter = Callable[[ProcessEngineClient | None, int], Awaitable[ProcessEngineClient]]

# seconds for a failed engine to exit by itself
_EXIT_GRACE: Final = 1.0
# seconds that a request waits for another engine, and most requests that wait
_HOLD_SECONDS: Final = 60.0
_MAX_HELD: Final = 2048
# times that the engine may end under one request without its fault, as far as is known
_MAX_LOSSES: Final = 4
# seconds of a suspect's turn, and of its wait for one: after that it runs without
_TURN_SECONDS: Final = 5.0
_QUARANTINE_SECONDS: Final = 30.0
# seconds for aborted requests to deliver their last delta
_ABORT_GRACE: Final = 5.0


class SupervisedEngineClient:
    """An ``EngineClient`` that outlives its engine. Make one with ``start``.

    Statistics add up over all engines. An engine's successor should have equal settings; ``info``
    is the successor's.
    """

    # called once, on the event loop, when the last engine has ended
    on_dead: Callable[[EngineDeadError], None] | None = None
    # called on the event loop for every snapshot
    on_stats: Callable[[EngineStats], None] | None = None
    # called on the event loop with frames of ``engine.timeline``; None: an engine has ended, and
    # another one may follow
    on_timeline: Callable[[bytes | None], None] | None = None

    def __init__(
        self, first: ProcessEngineClient, starter: Starter, max_restarts: int, window: float
    ) -> None:
        self._starter = starter
        self._restarts = Restarts(max_restarts, window)
        self._engine: Engine | None = None
        self._latest = first
        # sum over all engines that ended
        self._before: EngineStats | None = None
        self._stats = first.stats
        self._calls: dict[str, Call] = {}
        self._quarantine = Quarantine()
        # the adapters that were loaded, by key: every engine gets them
        self._adapters: dict[str, KnownAdapter] = {}
        # paths of loads under way, by key
        self._loading: dict[str, str] = {}
        self._deadly = DeadlyLoads()
        self._num_engines = 1
        self._replacing: asyncio.Task[None] | None = None
        self._counts = Counts()
        self._lost_why = ""
        # why this client ends the engine
        self._ending = ""
        # number of requests that wait for an engine
        self._num_held = 0
        # approximate duration of a start, s, for Retry-After
        self._start_seconds = 5.0
        self._dead: str | None = None
        self._draining = False
        # whether a drain's time limit has passed
        self._over = False
        self._closing: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._adopt(first)
        self._watching = asyncio.create_task(watch(self._current, self._end))

    @classmethod
    async def start(
        cls, starter: Starter, *, max_restarts: int = 5, window: float = 300.0
    ) -> SupervisedEngineClient:
        """Start the first engine and wait until it is ready.

        Args:
            starter: called for every engine; the previous one has ended by then. An error of the
                first call is raised; a later failure counts as one more restart.
            max_restarts: most engines started after the first within ``window`` seconds; 0: the
                first is the only one.
        """
        began = time.monotonic()
        client = cls(await starter(None, 0), starter, max_restarts, window)
        client._start_seconds = time.monotonic() - began
        return client

    # ------------------------------------------------------------------ EngineClient

    @property
    def info(self) -> EngineInfo:
        return self._latest.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._latest.tokenizer

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def pid(self) -> int:
        """The latest engine process, for logs."""
        return self._latest.pid

    @property
    def faults(self) -> EngineFaults:
        return self._counts.faults(up=self._engine is not None)

    async def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Yield deltas as ``EngineClient.generate`` does, across engines as the module says."""
        self._raise_if_dead()
        if self._draining:
            raise EngineDrainingError("the server is shutting down and takes no new requests")
        if request.request_id in self._calls:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        call = self._calls[request.request_id] = Call(request)
        self._idle.clear()
        try:
            while True:
                if request.adapter in self._adapters:
                    self._check_load(self._adapters[request.adapter].path)
                async with contextlib.aclosing(self._attempt(call, sink)) as outputs:
                    async for output in outputs:
                        yield output
                        if output.finished:
                            return
                self._judge(call)
        except Aborted:
            yield aborted_output(call.request)
        finally:
            del self._calls[request.request_id]
            if not self._calls:
                self._idle.set()

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return
        call.aborted = True
        if call.engine is not None:
            await call.engine.client.abort(request_id)
        else:
            fail_wait(call, Aborted())

    @property
    def adapters(self) -> Mapping[str, AdapterStatus]:
        """Latest news of each adapter."""
        return self._latest.adapters

    async def load_adapter(self, key: str, path: str, *, pinned: bool = False) -> AdapterStatus:
        """Load an adapter as ``EngineFrontend.load_adapter`` does; later engines get it too. Raises
        EngineLostError if the engine ends meanwhile, or ended twice under this load."""
        self._raise_if_dead()
        self._check_load(path)
        engine = self._engine
        if engine is None:
            raise self._lost()
        self._loading[key] = path
        try:
            status = await engine.client.load_adapter(key, path, pinned=pinned)
        except EngineDeadError:
            self._raise_if_dead()
            raise self._lost() from None
        finally:
            del self._loading[key]
        if status.status != "failed":
            self._adapters[key] = KnownAdapter(path, status.digest, pinned)
        return status

    def _check_load(self, path: str) -> None:
        """Raise EngineLostError while the adapter at ``path`` is left alone."""
        if self._deadly.check(path, time.monotonic()) and self._engine is not None:
            self._register(self._engine.client, lambda other: other == path)

    def _register(self, client: ProcessEngineClient, wanted: Callable[[str], bool]) -> None:
        """Tell an engine of the adapters whose paths are wanted."""
        self._adapters = for_the_next(self._adapters, self._latest.adapters)
        for key, (path, digest, pinned) in self._adapters.items():
            if wanted(path):
                client.register_adapter(key, path, digest, pinned=pinned)

    def register_adapter(
        self, key: str, path: str, digest: str = "", *, pinned: bool = False
    ) -> None:
        """Have this and later engines serve an adapter that was loaded before."""
        self._adapters[key] = KnownAdapter(path, digest, pinned)
        if self._engine is not None:
            self._engine.client.register_adapter(key, path, digest, pinned=pinned)

    def unload_adapter(self, key: str) -> None:
        """Forget an adapter; requests that use it go on."""
        self._adapters.pop(key, None)
        if self._engine is not None:
            self._engine.client.unload_adapter(key)

    def check_health(self) -> None:
        self._raise_if_dead()
        if self._engine is None:
            raise self._lost()
        self._engine.client.check_health()

    async def drain(self, timeout: float) -> None:
        self._draining = True
        if await happens_within(self._idle, timeout):
            return
        self._over = True
        for request_id in tuple(self._calls):
            await self.abort(request_id)
        await happens_within(self._idle, _ABORT_GRACE)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    # ------------------------------------------------------------------ requests

    async def _attempt(
        self, call: Call, sink: Sink | None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Yield deltas from one engine; ends early when the engine does."""
        request, suspect = call.request, call.suspect
        place: Place | None = None
        if suspect.level:
            # join at once: the order among all suspects of this engine matters
            place = call.place = self._quarantine.join(
                suspect, last=request.slo.best_effort, priority=request.priority
            )
        try:
            engine = await self._ready_engine(call)
            if place is not None:
                has_turn = await place.has_turn(_QUARANTINE_SECONDS)
                engine = await self._ready_engine(call)
                suspect.on_trial = has_turn and place.alone
                loop = asyncio.get_running_loop()
                loop.call_later(_TURN_SECONDS, self._quarantine.leave, place)
            call.place, call.engine = None, engine
            if suspect.on_trial:
                # this method must see every output
                sink = None
            async with contextlib.aclosing(engine.client.generate(request, sink)) as outputs:
                async for output in outputs:
                    if suspect.on_trial and suspect.is_past(output.num_output_tokens):
                        suspect.on_trial = False
                        assert place is not None, "a request on trial has a place"
                        self._quarantine.leave(place)
                    yield output
        except EngineDeadError:
            # _engine_gone has counted it, and _judge decides about the request
            if call.engine is None:
                raise
            resume = call.engine.client.take_resume(request.request_id)
            if resume is not None and resume.num_output_tokens:
                call.request = msgspec.structs.replace(request, resume=resume)
        finally:
            call.place, suspect.on_trial = None, False
            if place is not None:
                self._quarantine.leave(place)

    def _judge(self, call: Call) -> None:
        """Return if a request whose engine ended may be tried once more; raise otherwise."""
        engine, call.engine = call.engine, None
        assert engine is not None, "an attempt without an engine raises"
        self._raise_if_dead()
        if self._over:
            raise EngineDrainingError("the request was aborted: the server is shutting down")
        if engine.guilty is call.suspect:
            losses = call.losses + 1
            self._counts.poisoned += 1
            _log.error("request_poisoned id=%s losses=%d", call.request.request_id, losses)
            raise PoisonedRequestError(
                f"the engine ended {losses} times under this request ({self._lost_why}); it "
                "is not tried again"
            )
        if engine.guilty is None:
            call.losses += 1
        if call.losses >= _MAX_LOSSES:
            self._counts.lost += 1
            raise self._lost()
        self._counts.resent += 1

    async def _ready_engine(self, call: Call) -> Engine:
        """Return the engine, after waiting while there is none."""
        began = time.monotonic()
        while self._engine is None:
            self._raise_if_dead()
            if call.aborted:
                raise Aborted
            waited = time.monotonic() - began
            if waited > _HOLD_SECONDS or self._num_held >= _MAX_HELD:
                raise self._lost()
            call.waiter = asyncio.get_running_loop().create_future()
            self._num_held += 1
            try:
                async with asyncio.timeout(_HOLD_SECONDS - waited):
                    await call.waiter
            except TimeoutError:
                raise self._lost() from None
            finally:
                self._num_held -= 1
                call.waiter = None
        if call.aborted:
            raise Aborted
        return self._engine

    def _lost(self) -> EngineLostError:
        return EngineLostError(
            f"{self._lost_why}; another engine is being started: try again",
            max(1.0, self._start_seconds),
        )

    def _wake(self, error: Exception | None = None) -> None:
        """Let all calls that wait for an engine check again, or fail."""
        for call in self._calls.values():
            if error is not None:
                fail_wait(call, error)
            elif call.waiter is not None and not call.waiter.done():
                call.waiter.set_result(None)

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    # ------------------------------------------------------------------ engines

    def _adopt(self, client: ProcessEngineClient) -> None:
        engine = self._engine = Engine(client)
        client.on_stats = self._note_stats
        client.on_timeline = self._note_timeline
        client.on_dead = lambda error: self._engine_gone(engine, str(error))
        # it takes news of the engine before
        self._register(client, lambda path: path not in self._deadly)
        self._latest = client
        self._note_stats(client.stats)
        self._wake()
        self._quarantine.open()

    def _note_stats(self, stats: EngineStats) -> None:
        self._stats = stats if self._before is None else added(self._before, stats)
        if self.on_stats is not None:
            self.on_stats(self._stats)

    def _note_timeline(self, frames: bytes | None) -> None:
        if self.on_timeline is not None:
            self.on_timeline(frames)

    def _engine_gone(self, engine: Engine, why: str) -> None:
        """Handle an engine's end, before any of its requests gets the error."""
        if engine is not self._engine or self._closing is not None:
            return
        engine.guilty = find_guilty(self._started(engine))
        known = self._loading | {key: each.path for key, each in self._adapters.items()}
        loading = [e[1:] for e in engine.client.requests_in_flight() or () if e.startswith(LOADING)]
        self._deadly.note([known[key] for key in loading if key in known], time.monotonic())
        self._engine = None
        self._quarantine.close()
        kind, self._ending = self._ending or "exit", ""
        self._counts.losses[kind] += 1
        self._lost_why = why
        self._before = self._stats
        self._note_stats(EngineStats.at_rest(engine.client.info))
        _log.error("engine_failed kind=%s reason=%r requests=%d", kind, why, len(self._calls))
        self._replacing = asyncio.create_task(self._replace(engine.client))

    def _started(self, engine: Engine) -> list[tuple[Suspect, int]]:
        """Return the suspects of its last steps, with tokens delivered; all, if it left no list."""
        ids = engine.client.requests_in_flight()
        return [
            (call.suspect, engine.client.num_output_tokens(request_id))
            for request_id, call in self._calls.items()
            if call.engine is engine and (ids is None or request_id in ids)
        ]

    async def _replace(self, old: ProcessEngineClient) -> None:
        """Start engines until one is ready, or there were too many restarts."""
        began = time.monotonic()
        # an engine that ends by itself may still have to write something
        await old.wait_exit(_EXIT_GRACE)
        try:
            old.kill(self._lost_why)
            await old.close()
        except Exception:
            # its successor does not need the clean-up
            _log.exception("the engine that ended could not be cleaned up")
        while True:
            pause = self._restarts.take(time.monotonic())
            if pause is None:
                self._give_up()
                return
            if pause:
                await asyncio.sleep(pause)
            self._num_engines += 1
            started = time.monotonic()
            try:
                client = await self._starter(old, self._num_engines - 1)
            except Exception as error:
                # any error (no disk, no memory, no process): requests wait for the outcome
                known = isinstance(error, PacelineError)
                self._lost_why = str(error) if known else f"no engine: {type(error).__name__}"
                _log.error(
                    "engine_start_failed reason=%r",
                    self._lost_why,
                    exc_info=None if known else error,
                )
                continue
            break
        ended = time.monotonic()
        self._start_seconds = ended - started
        self._counts.recovery_seconds = ended - began
        restarts = self._restarts
        _log.warning(
            "engine_replaced pid=%d seconds=%.2f restarts=%d of %d within %g s",
            client.pid, ended - began, len(restarts), restarts.most, restarts.window,
        )  # fmt: skip
        self._adopt(client)

    def _give_up(self) -> None:
        self._dead = self._restarts.spent(self._lost_why)
        _log.critical("engine_given_up reason=%r", self._dead)
        self._wake(EngineDeadError(self._dead))
        if self.on_dead is not None:
            self.on_dead(EngineDeadError(self._dead))

    def _current(self) -> ProcessEngineClient | None:
        return None if self._engine is None else self._engine.client

    def _end(self, client: ProcessEngineClient, kind: str, reason: str) -> None:
        self._ending = kind
        client.kill(f"{reason}; it was ended")

    async def _close(self) -> None:
        self.on_dead = None
        self._draining = True
        self._dead = self._dead or "the engine was closed"
        for task in (self._watching, self._replacing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._wake(EngineDeadError(self._dead))
        await self._latest.close()
