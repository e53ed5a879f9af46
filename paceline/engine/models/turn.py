"""The turn: of the engines on the same processors one computes a step at a time.

::

    page (a file mapped by every engine)    header: whose turn it is, since when
                                            a slot per engine: pid, what it wants, what it used
    worker thread:   with turn: run(plan)   waits for the turn; who gives it back chooses the next

Two teams of threads that compute at once on the same cores disturb each other far more than they
gain. The wait is outside of what a backend measures, so step times stay true; the scheduler is told
how long others take (``neighbours``).

A holder that has died is passed over by the engines that wait for it, and so is, after a while, one
that hangs or was stopped: others then compute without the turn, slowly and not never. The page is
guarded by a file lock, which the system releases when its holder dies.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import select
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol, runtime_checkable

from paceline.engine.models.arbiter import Contender, choose_turn, longest_step
from paceline.errors import ConfigError
from paceline.files import private_opener

__all__ = ["SharingBackend", "Turn", "TurnUse", "make_page", "read_uses"]

_SLOTS: Final = 128
# slot of the holder, from 1, 0: none; since when; number of slots that were ever used
_HEAD: Final = struct.Struct("<qdq")
# see ``_Slot``
_SLOT: Final = struct.Struct("<q" + "d" * 8 + "q")
# longest time, s, without looking whether the holder lives
_LOOK: Final = 0.05
# shortest wait for the page's lock, s, which is held for microseconds
_SHORTEST_WAIT: Final = 1e-5
# a holder is passed over after this multiple of its predicted time, at least so many seconds
_OVERRUN: Final = 8.0
_LEAST_OVERRUN: Final = 0.5
# seconds without a step after which an engine is not counted as a neighbour
_LATELY: Final = 1.0
# part of a new measurement in the seconds that others take
_NEW: Final = 0.2


@runtime_checkable
class SharingBackend(Protocol):
    """A backend that can compute each step within a turn."""

    def take_turns(self, turn: AbstractContextManager[object]) -> None: ...


class _Slot(NamedTuple):
    pid: int = 0
    # since when it has waited; 0: it does not
    since: float = 0.0
    due: float = math.inf
    seconds: float = 0.0
    weight: float = 1.0
    # seconds computed
    used: float = 0.0
    # when it last had the turn or wanted it
    active: float = 0.0
    # longest step of others that its tokens' pace allows
    limit: float = math.inf
    # seconds that it has waited for turns, and times that it computed without
    waited: float = 0.0
    overruns: int = 0


@dataclass(frozen=True, slots=True)
class TurnUse:
    """Use that one engine has made of its turns so far."""

    pid: int
    used_seconds: float
    waited_seconds: float
    overruns: int


def make_page(path: Path) -> None:
    """Write an empty page; engines open it by its path."""
    with open(path, "wb", opener=private_opener) as file:
        file.write(bytes(_HEAD.size + _SLOTS * _SLOT.size))


def read_uses(path: Path) -> list[TurnUse]:
    """Return the use of each engine that has opened the page."""
    data = path.read_bytes()
    slots = (_Slot(*each) for each in _SLOT.iter_unpack(data[_HEAD.size :]))
    return [TurnUse(s.pid, s.used, s.waited, s.overruns) for s in slots if s.pid]


class Turn:
    """One engine's part of a page. ``planned`` and ``neighbours`` are called by the thread that
    plans, the context is entered by the one that computes.

    Raises ConfigError where the page has no place left.
    """

    def __init__(self, path: Path, weight: float = 1.0) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._page = mmap.mmap(self._fd, _HEAD.size + _SLOTS * _SLOT.size)
        # seconds, due time and tightest TPOT of the steps that are planned and not begun
        self._plans: deque[tuple[float, float, float]] = deque()
        self._away, self._measured_at = 0.0, -math.inf
        self._began = 0.0
        self._wakers: dict[int, int] = {}
        with self._locked():
            slots = self._slots()
            free = [n for n, slot in enumerate(slots) if not slot.pid or not _lives(slot.pid)]
            if not free and len(slots) == _SLOTS:
                raise ConfigError(f"more than {_SLOTS} engines share these processors")
            self._me = free[0] if free else len(slots)
            if self._holder()[0] == self._me:
                self._hold(None)
            count = max(len(slots), self._me + 1)
            _HEAD.pack_into(self._page, 0, *_HEAD.unpack_from(self._page)[:2], count)
            self._set(self._me, _Slot(os.getpid(), weight=weight))
        fifo = self._fifo(self._me)
        with suppress(FileExistsError):
            os.mkfifo(fifo, 0o600)
        self._bell = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    # ------------------------------------------------------------------ the thread that plans

    def neighbours(self, now: float) -> tuple[float, float]:
        """Return the seconds that others will take between two steps, and the longest step that
        leaves them their pace."""
        others = [
            slot
            for number, slot in enumerate(self._slots())
            if number != self._me and slot.pid and now - slot.active < _LATELY
        ]
        if not others:
            return 0.0, math.inf
        away = self._away
        if now - self._measured_at > _LATELY:
            away = sum(slot.seconds for slot in others)
        return away, min(slot.limit for slot in others)

    def planned(self, seconds: float, due: float, tightest_tpot: float) -> None:
        """Note a step that will be computed: predicted seconds, the time by which it must have
        ended, and the least TPOT target among its requests; infinite: none."""
        self._plans.append((seconds, due, tightest_tpot))

    # ------------------------------------------------------------------ the thread that computes

    def __enter__(self) -> None:
        seconds, due, tightest = self._plans.popleft() if self._plans else (0.0, math.inf, math.inf)
        now = time.monotonic()
        with self._locked():
            mine = self._slots()[self._me]
            used = mine.used
            if now - mine.active > _LATELY:
                # who was idle has not saved up turns
                used = max([used, *self._used_by_others(now, mine.weight)])
            limit = longest_step(seconds, tightest)
            self._set(
                self._me,
                mine._replace(
                    since=now, due=due, seconds=seconds, used=used, active=now, limit=limit
                ),
            )
            has_turn = self._try(now)
        while not has_turn:
            self._poll.poll(1000 * _LOOK)
            with suppress(BlockingIOError):
                os.read(self._bell, 64)
            with self._locked():
                has_turn = self._try(time.monotonic())
        self._began = time.monotonic()
        waited = self._began - now
        self._away += _NEW * (waited - self._away)
        self._measured_at = self._began
        with self._locked():
            mine = self._slots()[self._me]
            self._set(self._me, mine._replace(since=0.0, waited=mine.waited + waited))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        now = time.monotonic()
        with self._locked():
            mine = self._slots()[self._me]
            next_plan = self._plans[0] if self._plans else None
            mine = mine._replace(used=mine.used + now - self._began, active=now)
            if next_plan is not None:
                # another step is ready: it contends with those that wait
                mine = mine._replace(since=now, seconds=next_plan[0], due=next_plan[1])
            self._set(self._me, mine)
            if self._holder()[0] == self._me:
                self._pass_on(now)

    def close(self) -> None:
        """Leave the page."""
        with self._locked():
            self._set(self._me, _Slot())
            if self._holder()[0] == self._me:
                self._pass_on(time.monotonic())
        for fd in (*self._wakers.values(), self._bell):
            os.close(fd)
        self._page.close()
        os.close(self._fd)

    # ------------------------------------------------------------------ with the page locked

    def _try(self, now: float) -> bool:
        """Whether this engine may compute now."""
        holder, since = self._holder()
        if holder == self._me:
            self._hold(self._me, now)
            return True
        if holder is not None:
            slot = self._slots()[holder]
            if slot.pid and _lives(slot.pid):
                if now - since <= max(_LEAST_OVERRUN, _OVERRUN * slot.seconds):
                    return False
                mine = self._slots()[self._me]
                self._set(self._me, mine._replace(overruns=mine.overruns + 1))
            else:
                self._set(holder, _Slot())
        return self._pass_on(now) == self._me

    def _pass_on(self, now: float) -> int | None:
        """Give the turn to the engine that is to have it next; return which."""
        contenders = [
            Contender(
                slot=number, since=slot.since, due=slot.due, seconds=slot.seconds,
                weight=slot.weight, used=slot.used,
            )
            for number, slot in enumerate(self._slots())
            if slot.pid and slot.since
        ]  # fmt: skip
        chosen = choose_turn(contenders, now)
        self._hold(chosen, now)
        if chosen is not None and chosen != self._me:
            self._wake(chosen)
        return chosen

    def _used_by_others(self, now: float, weight: float) -> Iterator[float]:
        for number, slot in enumerate(self._slots()):
            if number != self._me and slot.pid and now - slot.active < _LATELY:
                yield slot.used / slot.weight * weight

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the page's lock; go on without it where an engine that was stopped keeps it, as two
        that compute at once are better than none."""
        began, wait = time.monotonic(), _SHORTEST_WAIT
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() - began > _LEAST_OVERRUN:
                    break
                time.sleep(wait)
                wait = min(2 * wait, _LOOK)
            else:
                break
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _holder(self) -> tuple[int | None, float]:
        holder, since, _ = _HEAD.unpack_from(self._page)
        return (holder - 1 if holder else None), since

    def _hold(self, slot: int | None, now: float = 0.0) -> None:
        count = _HEAD.unpack_from(self._page)[2]
        _HEAD.pack_into(self._page, 0, 0 if slot is None else slot + 1, now, count)

    def _slots(self) -> list[_Slot]:
        count = _HEAD.unpack_from(self._page)[2]
        used = self._page[_HEAD.size : _HEAD.size + count * _SLOT.size]
        return [_Slot(*each) for each in _SLOT.iter_unpack(used)]

    def _set(self, number: int, slot: _Slot) -> None:
        _SLOT.pack_into(self._page, _HEAD.size + number * _SLOT.size, *slot)

    def _fifo(self, number: int) -> str:
        return f"{self._path}.{number}"

    def _wake(self, number: int) -> None:
        if number not in self._wakers:
            try:
                self._wakers[number] = os.open(
                    self._fifo(number), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
                )
            except OSError:
                # it looks by itself
                return
        with suppress(BlockingIOError):
            os.write(self._wakers[number], b"\0")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
