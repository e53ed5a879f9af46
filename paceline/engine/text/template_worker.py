"""The worker of ``template_process``: ``python -m paceline.engine.text.template_worker LIMITS``.

Reads requests from the socket that is its standard input, answers each, and ends when the socket
does. It imports as little as it can: every checkpoint with its own template waits for it once.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from paceline.engine.text.template_process import EXIT_MEMORY, HEAD
from paceline.engine.text.template_sandbox import render_template
from paceline.errors import InvalidRequestError

__all__ = ["main"]


def _limit(memory_bytes: int) -> None:
    """Limit this process's memory and files, permanently."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    for kind, limit in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def _answer(request: bytes) -> bytes:
    try:
        source, variables = json.loads(request)
        return b"+" + render_template(source, variables).encode("utf-8", "surrogatepass")
    except InvalidRequestError as error:
        return b"-" + json.dumps([str(error), error.param]).encode()


def _read(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data


def main() -> int:
    limits: dict[str, Any] = json.loads(sys.argv[1])
    with contextlib.suppress(OSError):
        # when the machine runs out of memory, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    # the signal's default is to end the process, at any point
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit(limits["memory_bytes"])
    connection = socket.socket(fileno=0)
    try:
        while True:
            (size,) = HEAD.unpack(_read(connection, HEAD.size))
            signal.setitimer(signal.ITIMER_PROF, limits["cpu_seconds"])
            answer = _answer(_read(connection, size))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.sendall(HEAD.pack(len(answer)) + answer)
            del answer
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except (EOFError, OSError):
        # the server has ended
        return 0


if __name__ == "__main__":
    sys.exit(main())
