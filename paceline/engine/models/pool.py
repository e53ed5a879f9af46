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
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from paceline.engine.models.client import LoadableClient, Start
from paceline.engine.models.ledger import Account
from paceline.engine.models.model import Model, Ticket
from paceline.engine.models.states import Action, Load, ModelStates
from paceline.engine.process.forks import ForkServer
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

# a load is late after this multiple of what it was predicted to take, at least so many seconds:
# others are then loaded next to it
_LATE: Final = 3.0
_LEAST_LATE: Final = 5.0
# and it hangs after this multiple, from the first to the second number of seconds
_HANGS: Final = 20.0
_LEAST_HANGS: Final = 60.0
_LONGEST: Final = 600.0


class ModelPool:
    """Call ``start`` on the event loop, and ``close`` in the end.

    Args:
        starts: starts an engine, by name of the model.
        measure: returns what a loaded engine takes, as was booked; called on a thread. None: as
            booked.
        forks: used by ``starts``, and started after the first load; owned from here on.
    """

    def __init__(
        self,
        states: ModelStates,
        starts: Mapping[str, Start],
        *,
        measure: Callable[[EngineClient, Account], Account] | None = None,
        forks: ForkServer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.states = states
        self._starts, self._measure, self._clock = starts, measure, clock
        self._forks = forks
        self.clients: dict[str, LoadableClient] = {}
        # the latest action, all that are not done, and the loads among them, with their beginnings
        self._doing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[Model, tuple[asyncio.Task[None], float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        # requests that wait, and futures of those who wait for a model's state
        self._waits: dict[Ticket, asyncio.Future[None]] = {}
        self._watchers: set[asyncio.Future[None]] = set()
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
        _, began = self._loads.get(model, (None, self._clock()))
        return min(0.99, (self._clock() - began) / max(1e-3, expected))

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
        for task, _ in self._loads.values():
            task.cancel()
        # engines that end are waited for
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self.clients.values()))
        if self._forks is not None:
            self._forks.close()

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
            self._doing = self._started(self._do(action))
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
        if isinstance(action, Load):
            await self._load_within(model)
        else:
            await self._unload(model)
            self.states.unloaded(model, action.reason)
            _log.info("model_unloaded name=%s reason=%s", model.name, action.reason)
        self._wake_watchers()
        self._kick()
        if self._forks is not None and self._doing is asyncio.current_task():
            # nothing is loaded next: the processors are free for it
            self._forks.prepare()

    async def _load_within(self, model: Model) -> None:
        """Load a model. Others go on where it takes far longer than predicted, and it ends where it
        hangs."""
        expected = self.states.loads.predict(model.name, model.account.total)
        task = asyncio.current_task()
        assert task is not None, "loads are tasks"
        self._loads[model] = task, self._clock()
        loop = asyncio.get_running_loop()
        late = loop.call_later(max(_LEAST_LATE, _LATE * expected), self._set_aside, model)
        try:
            await self._load(model, min(_LONGEST, max(_LEAST_HANGS, _HANGS * expected)))
        finally:
            late.cancel()
            del self._loads[model]

    def _set_aside(self, model: Model) -> None:
        _log.warning("model_late name=%s: others go on meanwhile", model.name)
        self.states.set_aside(model)
        self._kick()

    async def _load(self, model: Model, longest: float) -> None:
        began = self._clock()
        client = self.clients.get(model.name)
        try:
            start = self._starts.get(model.name)
            if start is None:
                raise CheckpointError(model.spec.broken)
            try:
                async with asyncio.timeout(longest):
                    engine = await start(None if client is None else client.tokenizer)
            except TimeoutError:
                raise EngineDeadError(f"it was not loaded within {longest:.0f} s") from None
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
        self._started(self._unload(model)).add_done_callback(lambda _: self._kick())

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _wake_watchers(self) -> None:
        for future in tuple(self._watchers):
            with contextlib.suppress(asyncio.InvalidStateError):
                future.set_result(None)
