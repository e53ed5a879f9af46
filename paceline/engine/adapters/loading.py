"""The thread that loads adapters, and how little it takes from the steps that run meanwhile.

This module does not know what is loaded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

__all__ = ["LoadingThread", "Slices", "yield_to_steps"]

_log = logging.getLogger(__name__)

# added to the loading thread's niceness, so that it takes little from the threads of a step
_NICE: Final = 19
# while steps run, seconds of a slice of loading, and those that follow without any: a core that a
# step needs is taken from it for a slice at most, and a step of 10 ms meets two of them
_SLICE: Final = 0.5e-3
_PAUSE: Final = 5e-3


class LoadingThread(Protocol):
    """Loader of adapters, one after another: a ThreadPoolExecutor of one thread, or a fake."""

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Future[Any]: ...

    def shutdown(self, *, cancel_futures: bool) -> None: ...


class Slices:
    """Loading in slices, between which a thread sleeps while ``is_computing`` says so."""

    def __init__(self, is_computing: Callable[[], bool]) -> None:
        self._is_computing, self._since = is_computing, 0.0

    def begin(self) -> None:
        """Begin work on the calling thread."""
        self._since = time.thread_time()

    def pause(self) -> None:
        """Sleep if a slice is over."""
        if self._is_computing() and time.thread_time() - self._since >= _SLICE:
            time.sleep(_PAUSE)
            self.begin()


def yield_to_steps() -> None:
    """Let the calling thread take little from the threads of a step; other threads keep theirs."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except OSError as error:
        _log.info("the thread that loads adapters keeps its priority: %s", error)
