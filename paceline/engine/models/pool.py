"""The models of a server: leases for requests, loads and unloads one at a time.

::

    async with pool.lease("name") as client:      waits for room and load; the model stays meanwhile
        ...

``states`` decides, and this module carries out. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from paceline.engine.models.client import LoadableClient, Start
from paceline.engine.models.ledger import Account
from paceline.engine.models.model import Model, Ticket
from paceline.engine.models.states import Action, Load, ModelStates
from paceline.engine.process.client import SpareProcess
from paceline.engine.process.frontend import happens_within
from paceline.engine.protocol import EngineClient
from paceline.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineDrainingError,
    PacelineError,
)

__all__ = ["ModelPool"]

_log = logging.getLogger("paceline.models")


class ModelPool:
    """Call ``start`` on the event loop, and ``close`` in the end.

    Args:
        starts: starts an engine, by name of the model.
        measure: returns what a loaded engine takes, as was booked; called on a thread. None: as
            booked.
        spare: used by ``starts``, and made again after each load; owned from here on.
    """

    def __init__(
        self,
        states: ModelStates,
        starts: Mapping[str, Start],
        *,
        measure: Callable[[EngineClient, Account], Account] | None = None,
        spare: SpareProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.states = states
        self._starts, self._measure, self._clock = starts, measure, clock
        self._spare = spare
        self.clients: dict[str, LoadableClient] = {}
        # the action under way, and unloads of models whose engine has ended
        self._doing: asyncio.Task[None] | None = None
        self._is_loading = False
        self._ended: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        # requests that wait, and futures of those who wait for a model's state
        self._waits: dict[Ticket, asyncio.Future[None]] = {}
        self._watchers: set[asyncio.Future[None]] = set()
        self._load_began = 0.0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def lease(
        self, name: str, *, keep_alive: float | None = None
    ) -> AsyncGenerator[LoadableClient, None]:
        """Hold a model in memory; waits until it is there.

        Args:
            keep_alive: seconds that it is kept after the lease; None: no change.

        Raises:
            UnknownModelError, ModelFailedError, ModelRoomError: see ``ModelStates.ask``.
            EngineDrainingError: the pool is being closed.
        """
        ticket = await self.take(name)
        try:
            yield self.clients[ticket.model.name]
        finally:
            self.give(ticket, keep_alive)

    async def take(self, name: str) -> Ticket:
        """Return a lease, to be ended by ``give``. Raises as ``lease`` does."""
        ticket = self.ask(name)
        try:
            await self.granted(ticket)
        except BaseException:
            self.give(ticket)
            raise
        return ticket

    def ask(self, name: str) -> Ticket:
        """Return a ticket, to be ended by ``give`` in any case. Raises as ``lease`` does."""
        if self._closed:
            raise EngineDrainingError("the server is shutting down and loads no more models")
        ticket = self.states.ask(name, self._clock())
        self._idle.clear()
        if not ticket.is_granted:
            self._waits[ticket] = asyncio.get_running_loop().create_future()
            self._kick()
        return ticket

    async def granted(self, ticket: Ticket) -> None:
        """Return once a ticket is a lease; raises as ``lease`` does."""
        if (waits := self._waits.get(ticket)) is not None:
            await waits
        if ticket.error is not None:
            raise ticket.error

    def give(self, ticket: Ticket, keep_alive: float | None = None) -> None:
        """End a lease, or the wait for it."""
        self._waits.pop(ticket, None)
        self.states.leave(ticket, self._clock(), keep_alive)
        if not self._waits and not any(m.leases for m in self.states.models.values()):
            self._idle.set()
        self._kick()

    async def load(self, name: str) -> None:
        """Load a model and return once it is there. Raises as ``lease`` does."""
        self.states.load(name)
        async with self.lease(name):
            pass

    def prefetch(self, name: str) -> None:
        """Have a model loaded; returns at once. Raises as ``ModelStates.load`` does."""
        self.states.load(name)
        self._kick()

    def unload(self, name: str) -> None:
        """Unload a model as soon as no request uses it."""
        self.states.unload(name)
        self._kick()

    def pin(self, name: str, *, pinned: bool) -> None:
        self.states.pin(name, pinned=pinned)
        self._kick()

    def start(self) -> None:
        """Load what is pinned."""
        self._kick()

    def now(self) -> float:
        """Return the time on the clock of the states."""
        return self._clock()

    def progress(self, model: Model) -> float:
        """Return the part of a load that is done, by the seconds that it is expected to take."""
        expected = self.states.loads.predict(model.name, model.account.total)
        return min(0.99, (self._clock() - self._load_began) / max(1e-3, expected))

    async def changed(self) -> None:
        """Return after the next change of a model, or once the pool is drained."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.add(future)
        try:
            await future
        finally:
            self._watchers.discard(future)

    async def drain(self, timeout: float) -> None:
        """Take no more requests, wait up to ``timeout`` seconds for leases, abort the rest."""
        self._closed = True
        ends = time.monotonic() + timeout
        for waits in self._waits.values():
            if not waits.done():
                waits.set_exception(EngineDrainingError("the server is shutting down"))
        self._wake_watchers()
        await asyncio.gather(*(client.drain(timeout) for client in self.clients.values()))
        await happens_within(self._idle, max(0.0, ends - time.monotonic()))

    async def close(self) -> None:
        """End all engines."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._doing is not None:
            if self._is_loading:
                # an engine that ends is waited for
                self._doing.cancel()
            await asyncio.gather(self._doing, *self._ended, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self.clients.values()))
        if self._spare is not None:
            self._spare.close()

    # ------------------------------------------------------------------ carrying out

    def _kick(self) -> None:
        """Let what can be done be done: after each event, and when time has come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        now = self._clock()
        action = self.states.next(now)
        if action is not None:
            self._doing = asyncio.create_task(self._do(action))
        elif (wake_at := self.states.wake_at(now)) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.001, wake_at - now), self._kick)
        self._tell()

    def _tell(self) -> None:
        """Let the requests go on that were decided."""
        for ticket, waits in self._waits.items():
            if (ticket.is_granted or ticket.error is not None) and not waits.done():
                waits.set_result(None)

    async def _do(self, action: Action) -> None:
        model = action.model
        self._wake_watchers()
        self._is_loading = isinstance(action, Load)
        if isinstance(action, Load):
            await self._load(model)
        else:
            await self._unload(model)
            self.states.unloaded(model, action.reason)
            _log.info("model_unloaded name=%s reason=%s", model.name, action.reason)
        self._wake_watchers()
        self._kick()
        if self._spare is not None and self._doing is asyncio.current_task():
            # nothing is loaded next: the processors are free for it
            self._spare.prepare()

    async def _load(self, model: Model) -> None:
        began = self._load_began = self._clock()
        client = self.clients.get(model.name)
        try:
            start = self._starts.get(model.name)
            if start is None:
                raise CheckpointError(model.spec.broken)
            engine = await start(None if client is None else client.tokenizer)
        except Exception as error:
            known = isinstance(error, PacelineError)
            why = str(error) if known else f"{type(error).__name__}: {error}"
            _log.error("model_failed name=%s reason=%r", model.name, why)
            crashed = not isinstance(error, CheckpointError | ConfigError)
            self.states.failed(model, why, self._clock(), crashed=crashed)
            return
        if client is None:
            client = self.clients[model.name] = LoadableClient(engine)
            client.on_dead = lambda error: self._died(model, error)
        else:
            client.adopt(engine)
        account = model.account
        if self._measure is not None:
            account = await asyncio.to_thread(self._measure, engine, account)
            if client.engine is not engine:
                # it has ended meanwhile, as ``_died`` has taken in
                return
        seconds = self._clock() - began
        if self.states.loaded_as(model, account, seconds, self._clock()):
            _log.info(
                "model_loaded name=%s seconds=%.2f mib=%d", model.name, seconds,
                account.total >> 20,
            )  # fmt: skip
        else:
            await client.unload()

    async def _unload(self, model: Model) -> None:
        client = self.clients.get(model.name)
        if client is not None:
            try:
                await client.unload()
            except Exception:
                # its memory went with the process, whatever is left of the files
                _log.exception("model_unload_failed name=%s", model.name)

    def _died(self, model: Model, error: EngineDeadError) -> None:
        """Take in that a model's engine ended too often; others go on."""
        _log.error("model_dead name=%s reason=%r", model.name, str(error))
        self.states.failed(model, str(error), self._clock(), crashed=True)
        self._wake_watchers()
        task = asyncio.create_task(self._unload(model))
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)
        task.add_done_callback(lambda _: self._kick())

    def _wake_watchers(self) -> None:
        for future in tuple(self._watchers):
            with contextlib.suppress(asyncio.InvalidStateError):
                future.set_result(None)
