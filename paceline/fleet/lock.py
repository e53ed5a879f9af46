"""Lock of a fleet's folder: one controller at a time, found by its process id."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Final

from paceline.errors import ConfigError
from paceline.files import FILE_MODE, write_private

__all__ = ["ControllerLock"]

_LOOK_SECONDS: Final = 0.05


class ControllerLock:
    """Lock of one folder, which is free as soon as its process is gone, however that ended.

    Raises ConfigError on entry if the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._epoch = folder / "epoch"
        self._file = -1

    def __enter__(self) -> ControllerLock:
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except FileNotFoundError:
            # no fleet was started here
            pass
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be opened: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def holder(self) -> int:
        """Return the process that has it; 0: it is free. It is not kept."""
        if self._file < 0:
            return 0
        if self._try():
            fcntl.flock(self._file, fcntl.LOCK_UN)
            return 0
        text = os.pread(self._file, 32, 0).strip()
        return int(text) if text.isdigit() else -1

    def take(self) -> None:
        """Take it. Raises ConfigError if another process has it."""
        if not self._try():
            raise ConfigError(
                f"process {self.holder()} is this fleet's controller already: SIGHUP (kill -HUP) "
                "has it read the file again, SIGTERM ends it"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, b"%d" % os.getpid(), 0)

    def next_epoch(self, milliseconds: int) -> int:
        """Return the start of the controller that has the lock: the time, but later than every
        start before it, also where the clock was set back."""
        before = 0
        with contextlib.suppress(OSError, ValueError):
            before = int(self._epoch.read_text())
        epoch = max(milliseconds, before + 1)
        write_private(self._epoch, str(epoch))
        return epoch

    def take_over(self, seconds: float) -> None:
        """Ask the process that has it to end, and take it. Raises ConfigError."""
        until = time.monotonic() + seconds
        holder = self.holder()
        if holder > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGTERM)
        while self.holder() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        self.take()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
