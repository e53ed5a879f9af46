"""Where the page's what-if keeps what callers send and what comes of it, and whose it is.

::

    TMPDIR/paceline-what-if-XXXX/     0700, one of each server
        lock                          held for as long as the server's process lives
        1/                            of one caller: a key and a session
            trace                     what was uploaded
            job-3/                    of its latest job: minutes, log, N.frames

A server that shuts down takes its folder away. One that is killed cannot, but its lock is free from
then on, also for processes that do not see its pid, and the next server to start takes the folder
away (``sweep``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceline.http.errors import HttpError

__all__ = ["MOST_PLACES", "PREFIX", "Owner", "Place", "Places", "sweep"]

# callers whose traces and runs are kept
MOST_PLACES: Final = 8
PREFIX: Final = "paceline-what-if-"
# the file that is locked, and its name until it is
_LOCK_NAME: Final = "lock"
_UNLOCKED_NAME: Final = "lock.new"
# seconds after which a folder without a lock is nobody's
_UNLOCKED: Final = 86_400.0


class Owner(NamedTuple):
    """Whose a trace and a run are."""

    # the name of the API key; "" where nobody is asked for one
    key: str
    # as the page names itself; "" of programs that do not
    session: str


@dataclass(eq=False)
class Place:
    """What one caller sent, and what was simulated for it. Nobody else is told of it."""

    folder: Path
    # when it was last asked for, in seconds of the monotonic clock
    asked_at: float
    trace_bytes: int | None = None
    # of jobs that were begun
    number: int = 0
    # the latest job, as the page is told
    state: dict[str, Any] = field(default_factory=lambda: {"status": "idle"})
    # uploads and jobs that use the folder
    uses: int = 0
    # an upload is under way: a place has room for one beside the trace that it has
    receives: bool = False

    @property
    def trace(self) -> Path:
        return self.folder / "trace"

    @property
    def runs(self) -> Path:
        """Of the latest job: no file of another one has a name in it."""
        return self.folder / f"job-{self.number}"

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """It is not given up meanwhile."""
        self.uses += 1
        try:
            yield
        finally:
            self.uses -= 1

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """An upload is under way meanwhile. Raises HttpError 409 beside another one."""
        if self.receives:
            raise HttpError(409, "another trace of yours is being sent; wait until it was read")
        self.receives = True
        try:
            with self.in_use():
                yield
        finally:
            self.receives = False

    def make_runs(self) -> None:
        """An empty folder for the latest job; those before it go. Takes a thread's time."""
        for path in self.folder.glob("job-*"):
            shutil.rmtree(path, ignore_errors=True)
        self.runs.mkdir(0o700)


class Places:
    """Used from the event loop's thread. Nothing is on the disk until ``make`` is called."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._root: Path | None = None
        self._lock = -1
        self._places: dict[Owner, Place] = {}
        self._number = 0

    @property
    def root(self) -> Path | None:
        """The folder of all; None: there is none."""
        return self._root

    def find(self, owner: Owner) -> Place | None:
        return self._places.get(owner)

    def make(self, owner: Owner) -> Place:
        """The caller's place, a new one if it has none. Where all are taken, one is given up for
        it: of the key that has the most places, its own before another's, the place that was asked
        for the longest time ago. A key that would have more than another takes none of it.

        Raises:
            HttpError: 503, all of those are used just now.
            OSError: the folder cannot be made.
        """
        found = self._places.get(owner)
        if found is not None:
            return found
        if len(self._places) >= MOST_PLACES:
            self._give_one_up(owner.key)
        if self._root is None:
            self._root, self._lock = _locked_folder()
        self._number += 1
        folder = self._root / str(self._number)
        folder.mkdir(0o700)
        self._places[owner] = place = Place(folder, self._clock())
        return place

    def _give_one_up(self, key: str) -> None:
        """For a place more of ``key``."""
        held = Counter(owner.key for owner in self._places)
        held[key] += 1
        idle = [
            (-held[owner.key], owner.key != key, place.asked_at, owner)
            for owner, place in self._places.items()
            if not place.uses and held[owner.key] >= held[key]
        ]
        if not idle:
            raise HttpError(
                503,
                f"what-if keeps traces and runs of {MOST_PLACES} callers, and none of those that "
                "could be given up for yours is idle just now; try again later",
            )
        place = self._places.pop(min(idle)[-1])
        gone = partial(shutil.rmtree, place.folder, ignore_errors=True)
        asyncio.get_running_loop().run_in_executor(None, gone)

    async def close(self) -> None:
        """Forget everything. It begins anew with the next ``make``."""
        root, lock = self._root, self._lock
        self._root, self._lock = None, -1
        self._places.clear()
        if root is not None:
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
            os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    # a process that this one starts does not inherit it, so the lock ends with this one
    lock = os.open(made / _UNLOCKED_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # whoever sweeps finds it locked, or no lock and a folder that is too young to be nobody's
    os.rename(made / _UNLOCKED_NAME, made / _LOCK_NAME)
    return made, lock


def sweep(parent: Path | None = None) -> list[Path]:
    """Take away what servers left behind that were killed; answers what it was.

    Called at the start. Leaves alone what another user has, and what a living server holds.

    Args:
        parent: the folder of temporary files.
    """
    swept = []
    for path in Path(tempfile.gettempdir() if parent is None else parent).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            if _is_left(path, about.st_mtime):
                swept.append(path)
    return swept


def _is_left(path: Path, changed: float) -> bool:
    """Whether nobody held it; then it is gone. Raises OSError where that cannot be told."""
    try:
        lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - changed < _UNLOCKED:
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    try:
        # BlockingIOError: it is held
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
    return True
