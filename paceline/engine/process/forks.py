"""Engine processes forked from one that has done its imports.

::

    client ── socket ──> fork server          a byte, with a pipe's end for standard input and one
                            |                 for the exit code
                            fork ──> engine process, as if it had been started by itself

A start from there takes milliseconds where the imports take half a second of a processor, which
engines that compute meanwhile would feel. The fork server has no threads, sockets or files of an
engine. Engines live on where it ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from typing import Final

__all__ = ["ForkServer", "ForkedProcess", "is_forked"]

_READY: Final = b"R"
_FORK: Final = b"F"
_PID: Final = struct.Struct("<q")
_CODE: Final = struct.Struct("<i")
# seconds for a fork, after which the server is given up, and for an exit code
_PATIENCE: Final = 1.0


class ForkedProcess:
    """An engine process, with what its client needs of ``subprocess.Popen``."""

    def __init__(self, pid: int, handle: int, stdin: int, code: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        # readable at its end, also where the fork server that would tell the code has ended
        self._handle, self._code = handle, code

    def __del__(self) -> None:
        os.close(self._handle)
        os.close(self._code)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def wait(self) -> int:
        """Return the exit code once it has ended; call it once. 1 where nobody tells the code."""
        _is_readable(self._handle)
        data = os.read(self._code, _CODE.size) if _is_readable(self._code, _PATIENCE) else b""
        return int(_CODE.unpack(data)[0]) if len(data) == _CODE.size else 1


class ForkServer:
    """The client's side.

    Args:
        argv: a command line whose program calls ``is_forked`` before ``engine_main``.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False
        # engines may be started by several threads
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start the process, unless it runs. Without it, engines are started as ever."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.settimeout(_PATIENCE)
        self._socket = own
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                list(self._argv), stdin=its.fileno(), stdout=2, process_group=0
            )
        its.close()

    @property
    def is_ready(self) -> bool:
        """Whether its imports are done."""
        # another thread may close it meanwhile
        if (own := self._socket) is not None and not self._is_ready:
            with contextlib.suppress(OSError):
                self._is_ready = own.recv(1, socket.MSG_DONTWAIT) == _READY
        return self._is_ready

    def take(self) -> ForkedProcess | None:
        """Return a new engine process; None: there is no server, or its imports are not done. It
        waits for the fork, for a second at most, and may be called by any thread."""
        with self._lock:
            return self._take()

    def _take(self) -> ForkedProcess | None:
        own = self._socket
        if not self.is_ready or own is None:
            return None
        ends: list[int] = []
        try:
            for _ in range(2):
                ends += os.pipe()
            its_stdin, stdin, code, its_code = ends
            socket.send_fds(own, [_FORK], [its_stdin, its_code])
            pid = int(_PID.unpack(own.recv(_PID.size))[0])
            handle = os.pidfd_open(pid)
            ends = [its_stdin, its_code]
            return ForkedProcess(pid, handle, stdin, code)
        except (OSError, struct.error):
            # it has ended, or has no memory for another
            self.close()
            return None
        finally:
            for end in ends:
                os.close(end)

    def close(self) -> None:
        """End the server; engines go on."""
        process, self._process = self._process, None
        own, self._socket = self._socket, None
        self._is_ready = False
        if own is not None:
            own.close()
        if process is not None:
            process.kill()
            process.wait()


def is_forked() -> bool:
    """Serve forks on the socket that standard input is. True: this is a new engine process, whose
    standard input is its own. False: the client has ended or wants no more."""
    server = socket.socket(fileno=os.dup(0))
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    # where each engine's exit code goes
    codes: dict[int, int] = {}
    # what is shared with the engines is not copied for the collector's marks
    gc.freeze()
    try:
        server.send(_READY)
        while True:
            readable, _, _ = select.select([server, awake], [], [])
            if awake in readable:
                awake.recv(4096)
                _reap(codes)
            if server not in readable:
                continue
            data, ends, _, _ = socket.recv_fds(server, 1, 2)
            if data != _FORK or len(ends) != 2:
                return False
            pid = os.fork()
            if not pid:
                _become(ends[0])
                for end in (*ends, *codes.values()):
                    os.close(end)
                for each in (server, awake, wake):
                    each.close()
                return True
            codes[pid] = ends[1]
            os.close(ends[0])
            # the fork does it, too: its group is there before its number is told
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            server.send(_PID.pack(pid))
    except OSError:
        return False


def _become(stdin: int) -> None:
    """Make a fork a process as others."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    os.dup2(stdin, 0)


def _reap(codes: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if (code := codes.pop(pid, None)) is not None:
                with contextlib.suppress(OSError):
                    os.write(code, _CODE.pack(os.waitstatus_to_exitcode(status)))
                os.close(code)


def _is_readable(fd: int, seconds: float | None = None) -> bool:
    """Wait for a descriptor, of any number: ``select`` takes those below 1024 alone."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))
