"""Serves ``GET /metrics`` from shared memory: the whole program of a process of its own.

Run by path, with the standard library alone, so that it starts at once and stays small::

    python -I -S exporter_process.py LISTENER_FD MEMORY_FD

Standard input is a sign of life: when it ends, the server is gone and so is this. ``exporter``
writes the memory; the layout is declared here because this file can import nothing of ours::

    sequence (8)  length (8)  time (8)  text ...

The sequence is odd while the text is being replaced. ``time`` is of ``time.monotonic()``, which all
processes of one host share. The text ends with the line of a metric whose value becomes the age of
the text: whoever looks can tell a server that has stopped from one that is fine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["HEADER", "SEQUENCE", "main", "read_text"]

HEADER = struct.Struct("<QQd")
SEQUENCE = struct.Struct("<Q")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# connections at once: a scraper keeps one
_MAX_CONNECTIONS = 32
# seconds a connection may be idle
_IDLE = 120.0
# looks at a text that is being replaced, which takes microseconds
_LOOKS = 1000
_LOOK_EVERY = 1e-4

# of sched_setattr(2), which the C library has no function for
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = "=IIQiIQQQ"
_SLICE_NS = 100_000


def read_text(memory: mmap.mmap) -> tuple[bytes, float] | None:
    """The text and when it was made; None if there is none, or its writer stopped halfway."""
    for _ in range(_LOOKS):
        sequence, length, made = HEADER.unpack_from(memory)
        if sequence % 2 == 0:
            text = memory[HEADER.size : HEADER.size + length]
            if SEQUENCE.unpack_from(memory)[0] == sequence:
                return (text, made) if length else None
        time.sleep(_LOOK_EVERY)
    return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE
    disable_nagle_algorithm = True
    # head and body leave together
    wbufsize = -1
    memory: mmap.mmap

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, b"only /metrics is served here\n")
            return
        found = read_text(self.memory)
        if found is None:
            self._answer(503, b"no metrics yet\n")
            return
        text, made = found
        age = max(0.0, time.monotonic() - made)
        self._answer(200, text[: text.rindex(b" ")] + f" {age:.3f}\n".encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: scrapes come all the time."""


class _Server(ThreadingHTTPServer):
    """On a socket that listens already; connections past the limit are closed at once."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, memory: mmap.mmap) -> None:
        handler = type("Handler", (_Handler,), {"memory": memory})
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the scraper hung up."""


def _leave_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def ask_for_short_slices() -> bool:
    """Have the system run this process soon after it wakes, on processors that are kept busy.

    Linux from 6.12 on takes a slice of its own for an ordinary thread (``sched_runtime`` of
    sched_setattr(2); threads started later inherit it): who asks for little at a time runs sooner,
    and gets no more of the processor. Returns whether it was granted; elsewhere nothing changes.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    # size, policy, flags, nice, priority, runtime in ns, deadline, period
    size = struct.calcsize(_SCHED_ATTR)
    wanted = struct.pack(_SCHED_ATTR, size, 0, 0, os.nice(0), 0, _SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, wanted, 0) == 0)


def main() -> None:
    ask_for_short_slices()
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.setblocking(True)
    memory = mmap.mmap(int(sys.argv[2]), 0, prot=mmap.PROT_READ)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _Server(listener, memory).serve_forever(poll_interval=60.0)


if __name__ == "__main__":
    main()
