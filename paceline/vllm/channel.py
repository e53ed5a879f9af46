"""The way from vLLM's API processes to its engines: a Unix socket for each engine.

vLLM has none for us between the two. An engine listens at ``FOLDER/PARENT/ENGINE.sock``, where the
numbers are process ids; an API process finds the sockets below its own id or its parent's, so it
needs no setting. PACELINE_VLLM_CHANNEL names another folder. A message is a line of JSON, and so is
the answer::

    {"fate": "TAG"}   ->  {"refusal": {...} or null, "timeline": {...}, ...}; null: not known yet
    {"counts": true}  ->  {"steps": 740, "amended": 0, ...}
    {"foresee": {...}}  ->  {"predicted_ttft": 0.4, "refusal": null, ...}

This module does not import vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["Channel", "ask", "channel_folder"]

_VARIABLE: Final = "PACELINE_VLLM_CHANNEL"
# seconds that a message may take to arrive, and that its answer may take, several tries included
_PATIENCE, _LONGEST = 1.0, 3.0
# seconds on average until an engine that is busy with other callers is asked again: one step may
# refuse more requests than the socket's backlog holds
_PAUSE: Final = 0.1
_BACKLOG: Final = 1_024
_MOST_BYTES: Final = 65_536
_log: Final = logging.getLogger(__name__)
Answer = Callable[[Mapping[str, Any]], Any]


def channel_folder() -> Path:
    """Return the folder of all channels of this user."""
    return Path(
        os.environ.get(_VARIABLE) or Path(tempfile.gettempdir()) / f"paceline-vllm-{os.getuid()}"
    )


class Channel:
    """The engine's end: a thread that answers. A socket that cannot be made is logged; the engine
    then runs without."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._closed = answer, False
        self.path = channel_folder() / str(os.getppid()) / f"{os.getpid()}.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            # others must neither read fates nor take the engine's place
            self.path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(self.path.parent.parent):
                raise OSError(f"{self.path.parent.parent} belongs to another user")
            self.path.unlink(missing_ok=True)
            self._listener.bind(str(self.path))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            _log.error("no channel for paceline.vllm.Admission: %s", error)
            return
        threading.Thread(target=self._accept, name="paceline-channel", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            # wakes the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # no file descriptors are left, for now
                time.sleep(_PAUSE)
                continue
            # a caller may have given up, or not be ours
            with connection, contextlib.suppress(OSError, ValueError):
                self._reply(connection)

    def _reply(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        with connection.makefile("rb") as lines:
            message = json.loads(lines.readline(_MOST_BYTES))
        try:
            answer = json.dumps(self._answer(message))
        except Exception:
            # a fault of ours ends no refusal but this one
            _log.exception("a message of paceline.vllm.Admission was not answered")
            answer = "null"
        connection.sendall(answer.encode() + b"\n")


def _is_ours(folder: Path) -> bool:
    """Whether a folder is this user's: in /tmp another one may have made it first."""
    return folder.is_dir() and folder.stat().st_uid == os.getuid()


def _sockets() -> Iterator[Path]:
    if not _is_ours(channel_folder()):
        return
    for parent in (os.getpid(), os.getppid()):
        yield from sorted((channel_folder() / str(parent)).glob("*.sock"))


async def ask(message: Mapping[str, Any], patience: float | None = None) -> list[Any]:
    """Return the answers of all engines of this server that answer in time, without nulls."""
    answers = await asyncio.gather(
        *(_ask(path, message, patience or _LONGEST) for path in _sockets())
    )
    return [each for each in answers if each is not None]


async def _ask(path: Path, message: Mapping[str, Any], patience: float) -> Any:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while True:
                with contextlib.suppress(OSError, ValueError):
                    return await _ask_once(path, message)
                # those who were turned away together must not come back together
                await asyncio.sleep(random.uniform(0.0, 2.0 * _PAUSE))
    return None


async def _ask_once(path: Path, message: Mapping[str, Any]) -> Any:
    """Return an engine's answer; None if it has ended. Raises OSError or ValueError for none."""
    writer = None
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(json.dumps(message).encode() + b"\n")
        return json.loads(await reader.readline())
    except (ConnectionRefusedError, FileNotFoundError):
        # it has ended, or is starting
        return None
    finally:
        if writer is not None:
            writer.close()
