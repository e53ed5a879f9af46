"""Record of the requests that an engine works on, which outlives the process.

A crash leaves no time for a message: the last one may still be in a queue of the process. A file
stays. So the engine writes down the requests whose rows it is about to compute, and the supervisor
of a dead engine reads which may have caused its end.

This module does not know why a process ended.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from paceline.core.outputs import SchedulerOutput
from paceline.engine.fanout import request_of

__all__ = ["LOADING", "InFlightFile", "read_in_flight"]

_log = logging.getLogger(__name__)

# bytes of the length before the ids
_HEAD: Final = 4
# begins an entry that is no request, which no id contains
LOADING: Final = "\0"


class InFlightFile:
    """The engine's end of the file. Used from its thread.

    The file holds a length and the ids, a line each, and is written only when they change: while
    the same requests decode, a step costs a comparison. If it cannot be written it is removed, and
    then every request counts as a possible cause.

    Args:
        num_plans: plans of which one may still run: the engine's pipeline depth.
    """

    def __init__(self, path: Path, num_plans: int = 2) -> None:
        self._path = path
        self._plans: deque[tuple[str, ...]] = deque(maxlen=num_plans)
        # outside the steps: requests whose grammars are being compiled
        self._aside: frozenset[str] = frozenset()
        # adapters that are being loaded, as ``LOADING`` and their key
        self._loading: frozenset[str] = frozenset()
        self._written: object = None
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._give_up(error)

    def step(self, plan: SchedulerOutput) -> None:
        """Note a plan that is about to be executed."""
        self._plans.append(tuple([row.request_id for row in plan.rows]))
        self._write()

    def aside(self, request_ids: Iterable[str]) -> None:
        """Set the requests that are worked on outside the steps, from now on."""
        self._aside = frozenset(request_ids)
        self._write()

    def loading(self, keys: Iterable[str]) -> None:
        """Set the adapters that are being loaded, from now on."""
        self._loading = frozenset(LOADING + key for key in keys)
        self._write()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self) -> None:
        state = (tuple(self._plans), self._aside, self._loading)
        if self._fd is None or state == self._written:
            return
        ids = {request_of(choice) for plan in self._plans for choice in plan} | self._aside
        ids |= self._loading
        text = "\n".join(ids).encode()
        try:
            # in one call, as the process may end at any moment
            os.pwrite(self._fd, len(text).to_bytes(_HEAD) + text, 0)
        except OSError as error:
            self._give_up(error)
        self._written = state

    def _give_up(self, error: OSError) -> None:
        _log.warning("in_flight_file_given_up error=%r", error.strerror)
        self.close()
        self._path.unlink(missing_ok=True)


def read_in_flight(path: Path) -> frozenset[str] | None:
    """Return the ids of an engine's requests, or those at its end, and the adapters that it was
    loading, behind ``LOADING``; None: unknown."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if not data:
        # the engine has not planned a step
        return frozenset()
    text = data[_HEAD : _HEAD + int.from_bytes(data[:_HEAD])]
    return frozenset(text.decode(errors="replace").split("\n")) - {""}
