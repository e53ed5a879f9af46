"""The turn: of the engines on the same processors one computes a step at a time.

::

    worker thread:   with turn: run(plan)   waits for the turn; who gives it back chooses the next
                                            (``page`` has what each wants and has used)

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
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, runtime_checkable

from paceline.engine.models.arbiter import Contender, choose_turn, longest_step
from paceline.engine.models.loading import SLICE, lacking
from paceline.engine.models.page import LATELY, Page, Slot, lives

__all__ = ["SharingBackend", "Turn"]

# longest time, s, without looking whether the holder lives
_LOOK: Final = 0.05
# a holder is passed over after this multiple of its predicted time, at least so many seconds
_OVERRUN: Final = 8.0
_LEAST_OVERRUN: Final = 0.5
# part of a new measurement in the seconds that others take
_NEW: Final = 0.2


@runtime_checkable
class SharingBackend(Protocol):
    """A backend that can compute each step within a turn."""

    def take_turns(self, turn: AbstractContextManager[object]) -> None: ...


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
        self._began = 0.0
        self._wakers: dict[int, int] = {}
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
            for number, slot in enumerate(self._page.slots())
            if number != self._me and slot.pid and now - slot.active < LATELY
        ]
        if not others:
            return 0.0, math.inf
        away = self._away
        if now - self._measured_at > LATELY:
            away = sum(slot.seconds for slot in others if not slot.loads)
        return away, min(slot.limit for slot in others)

    def planned(self, seconds: float, due: float, tightest_tpot: float) -> None:
        """Note a step that will be computed: predicted seconds, the time by which it must have
        ended, and the least TPOT target among its requests; infinite: none."""
        self._plans.append((seconds, due, tightest_tpot))

    # ------------------------------------------------------------------ the thread that computes

    def __enter__(self) -> None:
        seconds, due, tightest = self._plans.popleft() if self._plans else (0.0, math.inf, math.inf)
        now = time.monotonic()
        with self._page.locked():
            mine = self._page.slots()[self._me]
            used = mine.used
            if now - mine.active > LATELY:
                # who was idle has not saved up turns
                used = max([used, *self._used_by_others(now, mine.weight)])
            limit = longest_step(seconds, tightest)
            self._page.set(
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
            with self._page.locked():
                has_turn = self._try(time.monotonic())
        with self._page.locked():
            got = time.monotonic()
            lacks = lacking(self._page, got, is_due=due < got + seconds + SLICE)
            waited = got - now + (SLICE if lacks else 0.0)
            mine = self._page.slots()[self._me]
            self._page.set(self._me, mine._replace(since=0.0, waited=mine.waited + waited))
        if lacks:
            time.sleep(SLICE)
        self._began = self._measured_at = time.monotonic()
        self._away += _NEW * (waited - self._away)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        now = time.monotonic()
        with self._page.locked():
            mine = self._page.slots()[self._me]
            next_plan = self._plans[0] if self._plans else None
            mine = mine._replace(used=mine.used + now - self._began, active=now)
            if next_plan is not None:
                # another step is ready: it contends with those that wait
                mine = mine._replace(since=now, seconds=next_plan[0], due=next_plan[1])
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

    # ------------------------------------------------------------------ with the page locked

    def _try(self, now: float) -> bool:
        """Whether this engine may compute now."""
        holder, since = self._page.holder()
        if holder == self._me:
            self._page.hold(self._me, now)
            return True
        if holder is not None:
            slot = self._page.slots()[holder]
            if slot.pid and lives(slot.pid):
                if now - since <= max(_LEAST_OVERRUN, _OVERRUN * slot.seconds):
                    return False
                mine = self._page.slots()[self._me]
                self._page.set(self._me, mine._replace(overruns=mine.overruns + 1))
            else:
                self._page.set(holder, Slot())
        return self._pass_on(now) == self._me

    def _pass_on(self, now: float) -> int | None:
        """Give the turn to the engine that is to have it next; return which."""
        contenders = [
            Contender(
                slot=number, since=slot.since, due=slot.due, seconds=slot.seconds,
                weight=slot.weight, used=slot.used,
            )
            for number, slot in enumerate(self._page.slots())
            if slot.pid and slot.since
        ]  # fmt: skip
        chosen = choose_turn(contenders, now)
        self._page.hold(chosen, now)
        if chosen is not None and chosen != self._me:
            self._wake(chosen)
        return chosen

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
