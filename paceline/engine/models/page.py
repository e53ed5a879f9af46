"""The page by which engines take turns: a file that each of them maps.

::

    header    whose turn it is, since when, number of slots that were ever used, whether one waits
    slots     one for each engine that computes, or loads or ends (``loading``)

A file lock guards it, which the system releases when its holder dies. This module does not know
whose turn is next.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from paceline.errors import ConfigError
from paceline.files import private_opener

__all__ = ["LATELY", "Page", "Slot", "TurnUse", "lives", "make_page", "read_uses"]

# seconds without a step after which an engine is not counted as a neighbour
LATELY: Final = 1.0
_SLOTS: Final = 128
# slot of the holder, from 1, 0: none; since when; number of slots that were ever used; 1: an engine
# waits for the turn, which steps that can stop read themselves
_HEAD: Final = struct.Struct("<qdqq")
_WANTED: Final = struct.calcsize("<qdq")
# see ``Slot``
_SLOT: Final = struct.Struct("<q" + "d" * 9 + "qq")
# shortest and longest wait for the page's lock, s, which is held for microseconds; and the time
# after which it is not waited for
_SHORTEST_WAIT: Final = 1e-5
_LONGEST_WAIT: Final = 0.05
_GIVE_UP: Final = 0.5


class Slot(NamedTuple):
    pid: int = 0
    # since when it has waited; 0: it does not
    since: float = 0.0
    due: float = math.inf
    # predicted seconds of its step; of a process that loads: those of a processor that it lacks
    seconds: float = 0.0
    weight: float = 1.0
    # seconds computed
    used: float = 0.0
    # when it last had the turn or wanted it; of a process that loads: when ``used`` was read
    active: float = 0.0
    # longest step of others that its tokens' pace allows
    limit: float = math.inf
    # seconds for which it computes before it can stop in a step; infinite: it cannot
    slice: float = math.inf
    # seconds that it has waited for turns, and times that it computed without
    waited: float = 0.0
    overruns: int = 0
    # 1: it loads a model, or ends, and takes no turn
    loads: int = 0


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
    slots = (Slot(*each) for each in _SLOT.iter_unpack(data[_HEAD.size :]))
    return [TurnUse(s.pid, s.used, s.waited, s.overruns) for s in slots if s.pid and not s.loads]


class Page:
    """One process's view of the page, with a slot of its own. All but ``locked`` and ``slots`` are
    called with the page locked."""

    def __init__(self, path: Path, slot: Slot) -> None:
        """Take a slot. Raises ConfigError where none is left."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._page = mmap.mmap(self._fd, _HEAD.size + _SLOTS * _SLOT.size)
        self._wanted: ctypes.c_int64 | None = None
        with self.locked():
            slots = self.slots()
            free = [n for n, each in enumerate(slots) if not each.pid or not lives(each.pid)]
            if not free and len(slots) == _SLOTS:
                raise ConfigError(f"more than {_SLOTS} engines share these processors")
            self.me = free[0] if free else len(slots)
            if self.holder()[0] == self.me:
                self.hold(None)
            count = max(len(slots), self.me + 1)
            holder, since, _, wanted = _HEAD.unpack_from(self._page)
            _HEAD.pack_into(self._page, 0, holder, since, count, wanted)
            self.set(self.me, slot)

    def wanted_address(self) -> int:
        """Return the address of 64 bits that are not zero while an engine waits. It holds until
        ``close``, and this view's memory as long as the process."""
        self._wanted = ctypes.c_int64.from_buffer(self._page, _WANTED)
        return ctypes.addressof(self._wanted)

    def close(self) -> None:
        """Close this view; its slot was emptied."""
        if self._wanted is None:
            self._page.close()
        os.close(self._fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the page's lock; go on without it where an engine that was stopped keeps it, as two
        that compute at once are better than none."""
        began, wait = time.monotonic(), _SHORTEST_WAIT
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() - began > _GIVE_UP:
                    break
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            else:
                break
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def holder(self) -> tuple[int | None, float]:
        """Return whose turn it is, and since when."""
        holder, since, _, _ = _HEAD.unpack_from(self._page)
        return (holder - 1 if holder else None), since

    def hold(self, slot: int | None, now: float = 0.0, *, wanted: bool = False) -> None:
        """Give the turn to a slot; ``wanted``: another one waits for it."""
        count = _HEAD.unpack_from(self._page)[2]
        _HEAD.pack_into(self._page, 0, 0 if slot is None else slot + 1, now, count, wanted)

    def want(self) -> None:
        """Say that an engine waits."""
        _HEAD.pack_into(self._page, 0, *_HEAD.unpack_from(self._page)[:3], 1)

    def slots(self) -> list[Slot]:
        count: int = _HEAD.unpack_from(self._page)[2]
        used = self._page[_HEAD.size : _HEAD.size + count * _SLOT.size]
        return [Slot(*each) for each in _SLOT.iter_unpack(used)]

    def set(self, number: int, slot: Slot) -> None:
        _SLOT.pack_into(self._page, _HEAD.size + number * _SLOT.size, *slot)


def lives(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
