"""Rendering of chat templates in a process of its own, with limits that the kernel enforces.

::

    render() --length, JSON--> template_worker --length, text or error--> render()
                                     |
                                     v  it took too long, too much memory, or crashed
                          killed; another one is started for the next render

A list of all costly operations of a language is never complete: ``"a" * n``, ``|int(base=16)`` of a
megabyte and a hash table of colliding integers are each one call. So the kernel limits processor
time, memory, files and core dumps, for the whole process and at any point.

This module does not know Jinja.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from typing import Any, Final

from paceline.errors import InvalidRequestError, RequestFailedError

__all__ = ["EXIT_MEMORY", "HEAD", "TemplateLimits", "TemplateProcess"]

_log = logging.getLogger(__name__)

_ARGV: Final = (sys.executable, "-m", "paceline.engine.text.template_worker")
# variables that the process inherits: none that may hold a secret
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LC_TIME", "TZ")
# before every message in both directions: the number of bytes that follow
HEAD: Final = struct.Struct("!Q")
# exit code of a worker whose memory is used up
EXIT_MEMORY: Final = 77
# a compromised worker may send any length
_MAX_REPLY: Final = 256 << 20
_PIECE: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Limits of one render."""

    # processor time, so that a busy machine does not fail an innocent template
    cpu_seconds: float = 2.0
    # address space in addition to that of the idle process
    memory_bytes: int = 512 << 20
    # until the reply arrives, also if the process only waits
    wall_seconds: float = 30.0


class TemplateProcess:
    """A ``chat_template.Renderer`` that is safe to use with any template.

    The first render starts the process. One render runs at a time; further threads wait. ``close``
    ends the process; so does the garbage collector, and the end of this process.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, None while there is none."""
        return None if self._worker is None else self._worker.pid

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Call ``template_sandbox.render_template``; waits, so not for an event loop's thread.

        Raises:
            InvalidRequestError: as from ``render_template``, or the process was stopped.
            RequestFailedError: no process could be started.
        """
        message = json.dumps([source, variables]).encode()
        with self._lock:
            worker = self._worker
            if worker is None or not worker.is_alive:
                self._end()
                worker = self._worker = _Worker(self._limits)
            try:
                reply = worker.ask(message)
            except _StoppedError as stop:
                _log.warning("template_stopped pid=%d reason=%r", worker.pid, str(stop))
                self._end()
                # start another one now, for the next render
                self._worker = _Worker(self._limits)
                raise InvalidRequestError(
                    f"the chat template was stopped: {stop}", "messages"
                ) from None
        if reply[:1] == b"+":
            return reply[1:].decode("utf-8", "surrogatepass")
        error, param = json.loads(reply[1:])
        raise InvalidRequestError(error, param)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _StoppedError(Exception):
    """The worker ended; the message says why."""


class _Worker:
    """One process and the socket to it."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        ours, theirs = socket.socketpair()
        try:
            # a process group of its own keeps the terminal's Ctrl-C away from it
            self._process = subprocess.Popen(
                [*_ARGV, json.dumps(asdict(limits))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                process_group=0,
            )
        except OSError as error:
            ours.close()
            raise RequestFailedError(
                f"the process for chat templates could not be started: {error.strerror}"
            ) from error
        finally:
            theirs.close()
        self._socket = ours
        # kills the process also when this one ends
        self.end = weakref.finalize(self, _end, self._process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: bytes) -> bytes:
        """Return the reply. Raises _StoppedError if the worker ends first, or is late."""
        deadline = time.monotonic() + self._limits.wall_seconds
        try:
            self._socket.settimeout(self._limits.wall_seconds)
            self._socket.sendall(HEAD.pack(len(message)) + message)
            (size,) = HEAD.unpack(self._receive(HEAD.size, deadline))
            if size > _MAX_REPLY:
                raise _StoppedError(f"it answered with {size} bytes")
            return self._receive(size, deadline)
        except TimeoutError:
            raise _StoppedError(f"it took more than {self._limits.wall_seconds:g} s") from None
        except (EOFError, OSError):
            raise _StoppedError(self._cause()) from None

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._socket.recv(min(size - len(data), _PIECE))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _cause(self) -> str:
        # the socket closes before the process can be waited for
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its process hung up"
        if code == -signal.SIGPROF:
            return f"it took more than {self._limits.cpu_seconds:g} s of processor time"
        if code == EXIT_MEMORY:
            return f"it took more than {self._limits.memory_bytes >> 20} MiB of memory"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
