"""The turn: of the engines on the same processors one computes a step at a time.

::

    worker thread:   with turn: run(plan)   waits for the turn; who gives it back chooses the next
                                            (``page`` has what each wants and has used)
    within a step:   turn.offer()           the same between two layers, while another one waits

Two teams of threads that compute at once on the same cores disturb each other far more than they
gain. The wait is outside of what a backend measures, so step times stay true; the scheduler is told
how long others take (``neighbours``).

A holder that has died is passed over by the engines that wait for it, and so is, after a while, one
that hangs or was stopped: others then compute without the turn, slowly and not never.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from paceline.engine.models.arbiter import Contender, choose_turn, longest_step
from paceline.engine.models.loading import SLICE, lacking
from paceline.engine.models.page import LATELY, Page, Slot, lives

__all__ = ["APART", "SharingBackend", "SlicedBackend", "Turn"]

# longest time, s, without looking whether the holder lives
_LOOK: Final = 0.05
# a holder is passed over after this multiple of its predicted time, at least so many seconds
_OVERRUN: Final = 8.0
_LEAST_OVERRUN: Final = 0.5
# seconds between two times that a step stops for others
APART: Final = 0.02
# part of a new measurement in the seconds that others take
_NEW: Final = 0.2


@runtime_checkable
class SharingBackend(Protocol):
    """A backend that can compute each step within a turn."""

    def take_turns(self, turn: AbstractContextManager[Callable[[], float]]) -> None: ...


@runtime_checkable
class SlicedBackend(Protocol):
    """A backend whose steps can stop while others compute."""

    def hand_over(self, wanted: int, offer: Callable[[], None], slice_s: float) -> int:
        """Call ``offer`` within steps while the 64 bits at ``wanted`` are not zero, ``slice_s``
        seconds apart at least; return how many times a step can."""


class Turn:
    """One engine's part of a page. ``planned`` and ``neighbours`` are called by the thread that
    plans, the context is entered by the one that computes.

    Raises ConfigError where the page has no place left.
    """

    def __init__(self, path: Path, weight: float = 1.0) -> None:
        self._path = path
        self._page = Page(path, Slot(os.getpid(), weight=weight))
        self._me = self._page.me
        # seconds, due time and tightest TPOT of the steps that are planned and not begun
        self._plans: deque[tuple[float, float, float]] = deque()
        self._away, self._measured_at = 0.0, -math.inf
        # of the step that runs: since when it computes, seconds that it waited before it began, and
        # those that it has lent since
        self._began = self._waited = self._lent = 0.0
        # times that a step can stop in it
        self._slices = 1
        self._wakers: dict[int, int] = {}
        fifo = self._fifo(self._me)
        with suppress(FileExistsError):
            os.mkfifo(fifo, 0o600)
        self._bell = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    def serve(self, backend: SharingBackend) -> None:
        """Have a backend compute in turns."""
        backend.take_turns(self)
        if isinstance(backend, SlicedBackend):
            self._slices = backend.hand_over(self._page.wanted_address(), self.offer, APART)

    # ------------------------------------------------------------------ the thread that plans

    def neighbours(self, now: float) -> tuple[float, float]:
        """Return the seconds that others will take between two steps, and the longest step that
        leaves them their pace."""
        others = [
            slot
            for number, slot in enumerate(self._page.slots())
            if number != self._me and slot.pid and now - slot.active < LATELY
        ]
        if not others:
            return 0.0, math.inf
        away = self._away
        if now - self._measured_at > LATELY:
            away = sum(min(slot.seconds, slot.slice) for slot in others if not slot.loads)
        # parts of a step are of unequal length, and longer than predicted now and then
        parts = max(1.0, self._slices / 2)
        return away, parts * min(slot.limit for slot in others)

    def planned(self, seconds: float, due: float, tightest_tpot: float) -> None:
        """Note a step that will be computed: predicted seconds, the time by which it must have
        ended, and the least TPOT target among its requests; infinite: none."""
        self._plans.append((seconds, due, tightest_tpot))

    # ------------------------------------------------------------------ the thread that computes

    def __enter__(self) -> Callable[[], float]:
        """Wait for the turn; return what says how many seconds of it were lent to others."""
        seconds, due, tightest = self._plans.popleft() if self._plans else (0.0, math.inf, math.inf)
        now = time.monotonic()
        with self._page.locked():
            mine = self._page.slots()[self._me]
            used = mine.used
            if now - mine.active > LATELY:
                # who was idle has not saved up turns
                used = max([used, *self._used_by_others(now, mine.weight)])
            limit = longest_step(seconds, tightest)
            mine = mine._replace(used=used, active=now, limit=limit)
            self._page.set(self._me, self._wanting(mine, now, seconds, due))
            has_turn = self._try(now)
        self._wait(has_turn)
        with self._page.locked():
            got = time.monotonic()
            lacks = lacking(self._page, got, is_due=due < got + seconds + SLICE)
            waited = got - now + (SLICE if lacks else 0.0)
            self._got_turn(waited)
        if lacks:
            time.sleep(SLICE)
        self._began = self._measured_at = time.monotonic()
        self._waited, self._lent = waited, 0.0
        return lambda: self._lent

    def offer(self) -> None:
        """Let another engine compute within a step, where it is to have the turn before this one;
        called by the step (``SlicedBackend``)."""
        now = time.monotonic()
        with self._page.locked():
            if self._page.holder()[0] != self._me:
                # it was passed over
                return
            mine = self._page.slots()[self._me]
            done = now - self._began
            mine = mine._replace(used=mine.used + done, active=now)
            self._page.set(self._me, self._wanting(mine, now, max(0.0, mine.seconds - done)))
            has_turn = self._pass_on(now) == self._me
        self._wait(has_turn)
        self._began = self._measured_at = time.monotonic()
        with self._page.locked():
            self._got_turn(self._began - now)
        self._lent += self._began - now

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._away += _NEW * (self._waited + self._lent - self._away)
        with self._page.locked():
            mine = self._page.slots()[self._me]
            next_plan = self._plans[0] if self._plans else None
            mine = mine._replace(used=mine.used + now - self._began, active=now)
            if next_plan is not None:
                # another step is ready: it contends with those that wait
                mine = self._wanting(mine, now, next_plan[0], next_plan[1])
            self._page.set(self._me, mine)
            if self._page.holder()[0] == self._me:
                self._pass_on(now)

    def close(self) -> None:
        """Leave the page."""
        with self._page.locked():
            self._page.set(self._me, Slot())
            if self._page.holder()[0] == self._me:
                self._pass_on(time.monotonic())
        for fd in (*self._wakers.values(), self._bell):
            os.close(fd)
        self._page.close()

    def _wait(self, has_turn: bool) -> None:
        while not has_turn:
            self._poll.poll(1000 * _LOOK)
            with suppress(BlockingIOError):
                os.read(self._bell, 64)
            with self._page.locked():
                now = time.monotonic()
                mine = self._page.slots()[self._me]
                if not mine.since:
                    # it was passed over meanwhile
                    self._page.set(self._me, mine._replace(since=now))
                has_turn = self._try(now)

    # ------------------------------------------------------------------ with the page locked

    def _wanting(self, mine: Slot, now: float, seconds: float, due: float | None = None) -> Slot:
        """Return a slot that waits for the turn since now."""
        apart = math.inf if self._slices == 1 else max(APART, seconds / self._slices)
        due = mine.due if due is None else due
        return mine._replace(since=now, due=due, seconds=seconds, slice=apart)

    def _got_turn(self, waited: float) -> None:
        mine = self._page.slots()[self._me]
        self._page.set(self._me, mine._replace(since=0.0, waited=mine.waited + waited))

    def _try(self, now: float) -> bool:
        """Whether this engine may compute now."""
        holder, since = self._page.holder()
        if holder == self._me:
            self._page.hold(self._me, now, wanted=len(self._contenders()) > 1)
            return True
        if holder is not None:
            slot = self._page.slots()[holder]
            if slot.pid and lives(slot.pid):
                if now - since <= max(_LEAST_OVERRUN, _OVERRUN * slot.seconds):
                    self._page.want()
                    return False
                mine = self._page.slots()[self._me]
                self._page.set(self._me, mine._replace(overruns=mine.overruns + 1))
                # one that was stopped while it waited would be chosen again and again
                self._page.set(holder, slot._replace(since=0.0))
            else:
                self._page.set(holder, Slot())
        return self._pass_on(now) == self._me

    def _pass_on(self, now: float) -> int | None:
        """Give the turn to the engine that is to have it next; return which."""
        contenders = self._contenders()
        chosen = choose_turn(contenders, now)
        self._page.hold(chosen, now, wanted=len(contenders) > 1)
        if chosen is not None and chosen != self._me:
            self._wake(chosen)
        return chosen

    def _contenders(self) -> list[Contender]:
        return [
            Contender(
                slot=number, since=slot.since, due=slot.due, seconds=slot.seconds,
                slice=slot.slice, weight=slot.weight, used=slot.used,
            )
            for number, slot in enumerate(self._page.slots())
            if slot.pid and slot.since
        ]  # fmt: skip

    def _used_by_others(self, now: float, weight: float) -> Iterator[float]:
        for number, slot in enumerate(self._page.slots()):
            if number != self._me and slot.pid and not slot.loads and now - slot.active < LATELY:
                yield slot.used / slot.weight * weight

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
