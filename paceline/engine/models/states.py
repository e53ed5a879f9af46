"""Models of one server as values: which are in memory, who leases and who awaits them.

::

    known --> loading --> ready <--> draining --> unloaded --> loading ...
                 `--> failed, until a time

Events go in; ``next`` says what is to be done, one thing at a time, and the driver (``pool``) does
it and reports; a load that takes far longer than predicted is set aside, and others go on. A
*lease* runs from before a request is read to its last byte, and only models without one go. A
draining model gives no leases: requests for it wait behind those for which it makes way. Time is an
argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from paceline.engine.models.arbiter import Resident, closes_at, victims
from paceline.engine.models.ledger import Account, Ledger
from paceline.engine.models.load_time import LoadTimes
from paceline.engine.models.model import Model, ModelSpec, State, Ticket
from paceline.errors import (
    ModelFailedError,
    ModelRoomError,
    PacelineError,
    QueueFullError,
    UnknownModelError,
)

__all__ = ["Action", "Load", "ModelStates", "Unload"]

# most names in an error
_MOST_NAMED: Final = 20
# a model stays in memory for at least this multiple of the time that its load took
_STAYS: Final = 2.0
# and after its last request for this part of the time of a swap: callers whose answers end in
# the same step ask again within moments
_LINGERS: Final = 0.25
# loads that may end an engine one after another, and seconds for which the model then rests
_MOST_CRASHES: Final = 2
_RESTS: Final = 60.0
# keep-alive, s, where the models do not all fit
_KEEP_ALIVE: Final = 300.0
# a request for a model that is not in memory waits for a switch at least this long, and a multiple
# of the load
_SWITCH_SECONDS: Final = 5.0
_SWITCH_LOADS: Final = 10.0


class Load(NamedTuple):
    model: Model


class Unload(NamedTuple):
    model: Model
    # "room", "keep_alive" or "asked"
    reason: str


Action: TypeAlias = Load | Unload


class ModelStates:
    """All models of a server.

    Args:
        memory: bytes for all that are in memory.
        max_models: most in memory at once; None: any number.
        keep_alive: of models that have none of their own; None: 5 minutes, or for ever if all fit.
        switch_wait: most seconds that a request for a model without room waits until another takes
            no more; None: ten loads, at least 5 s.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        memory: int,
        *,
        max_models: int | None = None,
        keep_alive: float | None = None,
        switch_wait: float | None = None,
    ) -> None:
        self.ledger = Ledger(memory)
        # seconds of loads, and of whole swaps, from the time at which others make way
        self.loads, self.swaps = LoadTimes(), LoadTimes()
        self.models = {spec.name: Model(spec, spec.account) for spec in specs}
        self._by_name = dict(self.models)
        self._max, self._keep_alive, self._switch_wait = max_models, keep_alive, switch_wait
        self._current: Action | None = None
        # models that make way, and for which one
        self._room_for: Model | None = None
        # the model that others make way for now, and since when
        self._swap: tuple[Model, float] | None = None
        self.evictions: dict[str, int] = {"room": 0, "keep_alive": 0, "asked": 0}
        self.loaded: dict[str, int] = {"ready": 0, "failed": 0}
        for model in self.models.values():
            self._by_name |= dict.fromkeys(model.spec.aliases, model)
            model.wanted = model.spec.pinned
            if model.spec.broken:
                self._fail(model, model.spec.broken, math.inf)

    @property
    def places(self) -> int:
        """Models that may be loaded without another going, as far as their number goes."""
        most = len(self.models) if self._max is None else self._max
        return most - len(self.ledger.accounts)

    # ------------------------------------------------------------------ events in

    def find(self, name: str) -> Model:
        """Return the model of a name or alias. Raises UnknownModelError."""
        model = self._by_name.get(name)
        if model is None:
            some = list(self.models)[:_MOST_NAMED]
            more = len(self.models) - len(some)
            raise UnknownModelError(
                f"The model {name[:80]!r} does not exist; served are {', '.join(some)}"
                + (f" and {more} more" if more else ""),
                "model",
            )
        return model

    def ask(self, name: str, now: float) -> Ticket:
        """Ask for a lease; see ``Ticket``. Raises UnknownModelError, ModelFailedError for a model
        that is not to be tried now, ModelRoomError for one that can never fit, QueueFullError where
        too many wait for it."""
        model = self.find(name)
        if model.state is State.FAILED:
            if now < model.retry_at:
                raise _failed(model, now)
            model.state = State.KNOWN
        if not model.is_resident and (error := self._never_fits(model)) is not None:
            raise error
        most = model.spec.max_waiting
        if model.state is not State.READY and most is not None and len(model.waiting) >= most:
            raise QueueFullError(
                f"{len(model.waiting)} requests wait for the model {model.name}, which is not in "
                f"memory, and at most {most} may",
                max(1.0, self.wait_for(name)),
            )
        ticket = Ticket(model, now)
        model.use(now)
        if model.state is State.READY:
            self._grant(ticket)
        else:
            model.waiting.append(ticket)
        return ticket

    def leave(self, ticket: Ticket, now: float, keep_alive: float | None = None) -> None:
        """End a lease, or the wait for it.

        Args:
            keep_alive: seconds that the model is kept from now on; None: no change.
        """
        model = ticket.model
        if ticket in model.leases:
            model.leases.remove(ticket)
            model.last_used = now
            if keep_alive is not None:
                model.keep_alive = keep_alive
        elif ticket in model.waiting:
            model.waiting.remove(ticket)
        self._reopen()

    def load(self, name: str) -> Model:
        """Have a model loaded, also one that failed. Raises UnknownModelError, ModelRoomError."""
        model = self.find(name)
        if model.state is State.FAILED:
            model.state, model.num_crashes = State.KNOWN, 0
        if not model.is_resident and (error := self._never_fits(model)) is not None:
            raise error
        is_going = isinstance(self._current, Unload) and self._current.model is model
        # one that is in memory is not to be loaded again once it has made way
        model.wanted = is_going or model.state in (State.KNOWN, State.UNLOADED)
        model.to_go = False
        if self._room_for is None:
            self._open_all()
        return model

    def unload(self, name: str) -> Model:
        """Have a model unloaded as soon as no lease is left; until then it gives none. One that is
        not in memory is not loaded for ``load`` any more."""
        model = self.find(name)
        model.wanted = False
        model.to_go = model.is_resident or model.state is State.LOADING
        if model.state is State.READY:
            model.state = State.DRAINING
        self._reopen()
        return model

    def pin(self, name: str, *, pinned: bool) -> Model:
        """Pin a model, so that it stays in memory once loaded, or end that."""
        model = self.find(name)
        model.spec = replace(model.spec, pinned=pinned)
        if pinned:
            # a pinned model makes no room for others
            self._open(model)
        return model

    # ------------------------------------------------------------------ what to do

    def next(self, now: float) -> Action | None:
        """Return what to do now: the driver does it, and reports; until then there is no more."""
        if self._current is not None:
            return None
        self._current = self._going(now) or self._coming(now)
        if isinstance(self._current, Load):
            model = self._current.model
            booked = self.ledger.book(model.name, model.account)
            assert booked, f"{model.name} was to be loaded without room"
            model.state, model.wanted = State.LOADING, False
        elif self._current is not None:
            self._current.model.state = State.DRAINING
        return self._current

    def set_aside(self, model: Model) -> None:
        """Let others be loaded and unloaded while a load takes longer than it should."""
        if isinstance(self._current, Load) and self._current.model is model:
            self._current = None

    def loaded_as(self, model: Model, account: Account, seconds: float, now: float) -> bool:
        """Take in that a load is done. False: it takes more than there is room for, so it is to be
        unloaded again."""
        self.set_aside(model)
        model.account, model.num_crashes = account, 0
        model.loaded_at, model.load_seconds = now, seconds
        model.last_used = max(model.last_used, now)
        self.loads.observe(model.name, account.total, seconds)
        if self._swap is not None and self._swap[0] is model:
            self.swaps.observe(model.name, account.total, now - self._swap[1])
            self._swap = None
        if not self.ledger.book(model.name, account):
            self.ledger.close(model.name)
            model.state = State.UNLOADED
            if (error := self._never_fits(model)) is not None:
                self.loaded["failed"] += 1
                self._fail(model, str(error), now + _RESTS, error)
            return False
        self.loaded["ready"] += 1
        model.state = State.READY
        self._admit(model)
        return True

    def failed(self, model: Model, why: str, now: float, *, crashed: bool) -> None:
        """Take in that a load has failed, or that the model's engine has ended for good.

        Args:
            crashed: the engine ended, and might not another time; else the model's files are at
                fault.
        """
        if self._current is not None and self._current.model is model:
            self._current = None
        self.ledger.close(model.name)
        served = model.is_resident
        self.loaded["failed"] += not served
        # requests of an engine that has ended have ended with it
        model.leases.clear()
        model.num_crashes += 1
        if crashed and not served and model.num_crashes < _MOST_CRASHES:
            model.state, model.reason = State.UNLOADED, why
        else:
            self._fail(model, why, now + _RESTS)

    def unloaded(self, model: Model, reason: str) -> None:
        """Take in that a model's engine has ended as asked."""
        self._current = None
        self.ledger.close(model.name)
        self.evictions[reason] += 1
        model.state, model.to_go, model.keep_alive = State.UNLOADED, False, None

    def wake_at(self, now: float) -> float | None:
        """Return when ``next`` may have something to do without an event; None: never."""
        if self._current is not None:
            return None
        times = [
            model.last_used + kept
            for model in self.models.values()
            if self._is_idle(model) and (kept := self.kept(model)) < math.inf
        ]
        if (head := self._head()) is not None:
            times += [
                self._stays_until(model, head)
                for model in self.models.values()
                if self._may_go(model)
            ]
            times += [
                self._closes_at(model, head)
                for model in self.models.values()
                if model.state is State.READY and not model.spec.pinned
            ]
        return min((each for each in times if each > now), default=None)

    def kept(self, model: Model) -> float:
        """Return the seconds without a lease after which a model is unloaded."""
        for seconds in (model.keep_alive, model.spec.keep_alive, self._keep_alive):
            if seconds is not None:
                return seconds
        return math.inf if self._all_fit() else _KEEP_ALIVE

    def wait_for(self, name: str) -> float:
        """Return the predicted seconds until a lease of the model is granted."""
        model = self.find(name)
        if model.state is State.READY:
            return 0.0
        seconds = self.loads.predict(model.name, model.account.total)
        if model.state is not State.LOADING and self._lacks(model) > 0:
            seconds = max(seconds, self.swaps.known(model.name) or 0.0)
        if isinstance(self._current, Load) and self._current.model is not model:
            other = self._current.model
            seconds += self.loads.predict(other.name, other.account.total)
        return seconds

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds."""
        self.ledger.check_integrity()
        for model in self.models.values():
            booked = model.name in self.ledger.accounts
            assert booked == (model.is_resident or model.state is State.LOADING), model
            assert not model.leases or model.is_resident, model
            assert not (model.waiting and model.state is State.READY), model
            assert not (model.waiting and model.state is State.FAILED), model
        if isinstance(self._current, Unload):
            assert not self._current.model.leases, "a model in use goes"
        resident = [m for m in self.models.values() if m.name in self.ledger.accounts]
        assert self._max is None or len(resident) <= self._max, "too many are in memory"

    # ------------------------------------------------------------------ choices

    def _going(self, now: float) -> Unload | None:
        """Return a model that goes without another's need."""
        for model in self.models.values():
            if not self._is_idle(model):
                continue
            if model.to_go:
                return Unload(model, "asked")
            if not model.spec.pinned and now >= model.last_used + self.kept(model):
                return Unload(model, "keep_alive")
        return None

    def _coming(self, now: float) -> Action | None:
        """Return the load of the model whose request has waited longest, or who makes way."""
        while (head := self._head()) is not None and (error := self._never_fits(head)) is not None:
            # others were pinned meanwhile
            self._refuse(head, error)
        if head is None:
            return None
        lacking = head.account.total - self.ledger.free
        places = self._places_lacking()
        if self._lacks(head) <= 0:
            self._room_for = None
            self._open_all()
            return Load(head)
        able = [
            model
            for model in self.models.values()
            if self._may_go(model) and now >= self._stays_until(model, head)
        ]
        if (going := victims(self._residents(able, now), lacking, places)) is not None:
            self._begin_swap(head, now)
            return Unload(self.models[going[0]], "room")
        self._close(head, lacking, places, now)
        return None

    def _close(self, head: Model, lacking: int, places: int, now: float) -> None:
        """Close the intake of models in use that make way for ``head``, where it is time."""
        candidates = [m for m in self.models.values() if m.is_resident and not m.spec.pinned]
        going = victims(self._residents(candidates, now), lacking, places) or ()
        self._room_for = head
        for model in map(self.models.__getitem__, going):
            if model.state is State.READY and now >= self._closes_at(model, head):
                model.state = State.DRAINING
                self._begin_swap(head, now)

    def _begin_swap(self, head: Model, now: float) -> None:
        if self._swap is None or self._swap[0] is not head:
            self._swap = head, now

    def _lacks(self, model: Model) -> int:
        """Return what a model lacks to be loaded, in bytes or places; 0 or less: nothing."""
        return max(model.account.total - self.ledger.free, self._places_lacking())

    def _places_lacking(self) -> int:
        return 0 if self._max is None else len(self.ledger.accounts) + 1 - self._max

    def _head(self) -> Model | None:
        """Return the model, not in memory, whose request has waited longest."""
        out = [
            model
            for model in self.models.values()
            if model.state in (State.KNOWN, State.UNLOADED) and (model.waiting or model.wanted)
        ]
        return min(out, key=_since, default=None)

    def _swap_seconds(self, head: Model) -> float:
        # before the first swap the load alone is known
        load = self.loads.predict(head.name, head.account.total)
        return max(load, self.swaps.known(head.name) or 0.0)

    def _closes_at(self, model: Model, head: Model) -> float:
        swap = self._swap_seconds(head)
        most = self._switch_wait
        most = max(_SWITCH_SECONDS, _SWITCH_LOADS * swap) if most is None else most
        return closes_at(_since(head), model.loaded_at, swap, most)

    def _reopen(self) -> None:
        """Let models take requests again that make way for one that is not wanted any more."""
        head = self._room_for
        if head is None or head.waiting or head.wanted:
            return
        self._room_for = None
        self._open_all()

    def _open_all(self) -> None:
        for model in self.models.values():
            self._open(model)

    def _open(self, model: Model) -> None:
        is_going = self._current is not None and self._current.model is model
        if model.state is State.DRAINING and not is_going and not model.to_go:
            model.state = State.READY
            self._admit(model)

    def _is_idle(self, model: Model) -> bool:
        return (
            model.is_resident
            and not model.leases
            and not (model.state is State.READY and model.waiting)
        )

    def _may_go(self, model: Model) -> bool:
        return self._is_idle(model) and not model.spec.pinned

    def _stays_until(self, model: Model, head: Model) -> float:
        """Return until when an idle model stays, whatever ``head`` waits for."""
        lingers = model.last_used + _LINGERS * self._swap_seconds(head)
        return max(
            model.loaded_at + _STAYS * model.load_seconds,
            min(lingers, self._closes_at(model, head)),
        )

    def _all_fit(self) -> bool:
        total = sum(m.account.total for m in self.models.values() if m.state is not State.FAILED)
        few = self._max is None or len(self.models) <= self._max
        return few and total <= self.ledger.memory

    def _never_fits(self, model: Model) -> ModelRoomError | None:
        pinned = [
            self.ledger.accounts[other.name].total
            for other in self.models.values()
            if other.spec.pinned and other is not model and other.name in self.ledger.accounts
        ]
        if self._max is not None and len(pinned) >= self._max:
            return ModelRoomError(
                f"The model {model.name} has no place: at most {self._max} are in memory at once, "
                f"and {len(pinned)} are pinned"
            )
        room = self.ledger.memory - sum(pinned)
        if model.account.total <= room:
            return None
        why = " next to pinned models" if pinned else ""
        return ModelRoomError(
            f"The model {model.name} takes {_mib(model.account.total)} MiB, and there are "
            f"{_mib(room)} MiB for models{why}"
        )

    def _residents(self, models: Iterable[Model], now: float) -> list[Resident]:
        return [
            Resident(
                name=model.name,
                num_bytes=model.account.total,
                load_seconds=model.load_seconds,
                rate=model.rate(now),
                last_used=model.last_used,
            )
            for model in models
        ]

    # ------------------------------------------------------------------ tickets

    def _grant(self, ticket: Ticket) -> None:
        ticket.is_granted = True
        ticket.model.leases.add(ticket)

    def _admit(self, model: Model) -> None:
        waiting, model.waiting = model.waiting, []
        for ticket in waiting:
            self._grant(ticket)

    def _fail(
        self, model: Model, why: str, retry_at: float, error: PacelineError | None = None
    ) -> None:
        model.state, model.reason, model.retry_at = State.FAILED, why, retry_at
        model.to_go = False
        self._refuse(model, error)

    def _refuse(self, model: Model, error: PacelineError | None) -> None:
        """Refuse all who wait for a model; None: as it has failed."""
        model.wanted = False
        waiting, model.waiting = model.waiting, []
        for ticket in waiting:
            ticket.error = error or _failed(model, ticket.since)
        self._reopen()


def _since(model: Model) -> float:
    return min((ticket.since for ticket in model.waiting), default=math.inf)


def _failed(model: Model, now: float) -> ModelFailedError:
    wait = model.retry_at - now
    return ModelFailedError(
        f"The model {model.name} cannot be loaded: {model.reason}",
        _RESTS if wait == math.inf else max(1.0, wait),
    )


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // 2**20)
