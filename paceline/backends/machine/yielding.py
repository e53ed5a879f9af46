"""Loading on threads that yield to the engines which compute meanwhile.

A thread of the lowest scheduling class leaves its processor to any other at once, so a step next to
it takes hardly longer. A process without privileges cannot raise a thread again: so the work is
done by threads that end with it, and none that computes later is among them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Protocol, TypeVar

__all__ = ["Beside", "at_once", "lower_all", "yielding"]

T = TypeVar("T")
# seconds between two looks at who computes
_LOOK: Final = 0.02
_TASKS: Final = Path("/proc/self/task")


class Beside(Protocol):
    """How work is done that belongs to no step."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


def at_once(work: Callable[[], T], /) -> T:
    """Do work on the calling thread, as where nobody else computes."""
    return work()


def yielding(work: Callable[[], T], /, *, is_crowded: Callable[[], bool]) -> T:
    """Do work on a new thread, and return or raise what it does. While ``is_crowded`` says so, that
    thread and those that it starts have the lowest priority, where the system knows one."""
    done: Future[T] = Future()
    before = _tasks()
    is_low = is_crowded()

    def run() -> None:
        if is_low:
            _set(threading.get_native_id(), low=True)
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="paceline-load", daemon=True)
    thread.start()
    while True:
        thread.join(_LOOK)
        if not thread.is_alive():
            return done.result()
        if is_crowded() != is_low:
            is_low = not is_low
            for task in _tasks() - before:
                _set(task, low=is_low)


def lower_all() -> None:
    """Give every thread of this process, which is about to end, the lowest priority: its memory is
    freed by them."""
    for task in _tasks():
        _set(task, low=True)


def _tasks() -> set[int]:
    try:
        return {int(each.name) for each in _TASKS.iterdir()}
    except OSError:
        return set()


def _set(task: int, *, low: bool) -> None:
    if hasattr(os, "SCHED_IDLE"):
        # one that may not be raised again stays low until it ends, as it soon does
        with contextlib.suppress(OSError):
            os.sched_setscheduler(task, os.SCHED_IDLE if low else os.SCHED_OTHER, os.sched_param(0))
