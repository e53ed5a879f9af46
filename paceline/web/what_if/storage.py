"""The what-if's folders of uploads and results, one per caller.

::

    TMPDIR/paceline-what-if-XXXX/     0700, one per server
        lock                          held while the server's process lives
        1/                            one caller, that is a key and a session
            trace                     the upload
            job-3/                    its latest job: minutes, log, N.frames

A server that shuts down removes its folder. A killed one cannot, but its lock becomes free, also
for processes that do not see its pid, and the next server to start removes the folder (``sweep``).
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

# maximum callers whose traces and runs are kept
MOST_PLACES: Final = 8
PREFIX: Final = "paceline-what-if-"
# the locked file, and its name before it is locked
_LOCK_NAME: Final = "lock"
_UNLOCKED_NAME: Final = "lock.new"
# seconds after which a folder without a lock counts as abandoned
_UNLOCKED: Final = 86_400.0


class Owner(NamedTuple):
    """The owner of a trace and its runs."""

    # the name of the API key; "" without keys
    key: str
    # the page's own name for the session; "" for programs without one
    session: str


@dataclass(eq=False)
class Place:
    """The trace that one caller sent, and its simulations. Other callers cannot see it."""

    folder: Path
    # time of the last request for it, in seconds of the monotonic clock
    asked_at: float
    trace_bytes: int | None = None
    # number of started jobs
    number: int = 0
    # the latest job, as sent to the page
    state: dict[str, Any] = field(default_factory=lambda: {"status": "idle"})
    # number of uploads and jobs that use the folder
    uses: int = 0
    # an upload runs; the folder has space for one in addition to its trace
    receives: bool = False

    @property
    def trace(self) -> Path:
        return self.folder / "trace"

    @property
    def runs(self) -> Path:
        """Folder of the latest job; runs of other jobs are in other folders."""
        return self.folder / f"job-{self.number}"

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep this folder from being reclaimed inside the block."""
        self.uses += 1
        try:
            yield
        finally:
            self.uses -= 1

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Mark an upload as running inside the block. Raises HttpError 409 if one runs already."""
        if self.receives:
            raise HttpError(409, "another trace of yours is being sent; wait until it was read")
        self.receives = True
        try:
            with self.in_use():
                yield
        finally:
            self.receives = False

    def make_runs(self) -> None:
        """Make an empty folder for the latest job; remove earlier ones. Call it on a thread."""
        for path in self.folder.glob("job-*"):
            shutil.rmtree(path, ignore_errors=True)
        self.runs.mkdir(0o700)


class Places:
    """Folders of all callers, for the event loop's thread. Nothing is on disk before ``make``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._root: Path | None = None
        self._lock = -1
        self._places: dict[Owner, Place] = {}
        self._number = 0

    @property
    def root(self) -> Path | None:
        """The folder that holds all others; None before the first."""
        return self._root

    def find(self, owner: Owner) -> Place | None:
        return self._places.get(owner)

    def make(self, owner: Owner) -> Place:
        """Return the caller's place, a new one if it has none. If all are taken, an idle one is
        reclaimed: from the key with most places, with ties from the caller's own key first, the one
        unused for the longest time. A key that would have more than another takes none of its
        places.

        Raises:
            HttpError: 503, all candidates are in use.
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
        """Reclaim a place so that ``key`` can have one more."""
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
        """Forget all data. The next ``make`` starts from nothing."""
        root, lock = self._root, self._lock
        self._root, self._lock = None, -1
        self._places.clear()
        if root is not None:
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
            os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds its lock."""
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    # child processes do not inherit it, so the lock ends with this process
    lock = os.open(made / _UNLOCKED_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # a sweep finds it locked, or without a lock and too young to be abandoned
    os.rename(made / _UNLOCKED_NAME, made / _LOCK_NAME)
    return made, lock


def sweep(parent: Path | None = None) -> list[Path]:
    """Remove the folders that killed servers have left behind; return their paths.

    Called at the start. Skips folders of other users and of living servers.

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
    """Remove a folder without a living owner; return whether it did. Raises OSError if the lock is
    held or cannot be checked."""
    try:
        lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - changed < _UNLOCKED:
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    try:
        # BlockingIOError: the lock is held
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
    return True
