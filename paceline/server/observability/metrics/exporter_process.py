"""Serves ``GET /metrics`` from shared memory: the whole program of a separate process.

Run by path, with the standard library only, so that it starts at once and stays small::

    python -I -S exporter_process.py LISTENER_FD MEMORY_FD

Standard input signals the server's life: at its end the server is gone, and this process exits.
``exporter`` writes the memory; the layout is declared here, as this file cannot import it::

    sequence (8)  length (8)  time (8)  text ...

The sequence is odd while the text is being replaced. ``time`` is from ``time.monotonic()``, which
all processes of a host share. The text ends with the line of a metric whose value becomes the
text's age, so that a reader can tell a stalled server from a healthy one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import selectors
import socket
import struct
import sys
import time

__all__ = ["CONTENT_TYPE", "HEADER", "SEQUENCE", "Answers", "Exporter", "main", "read_text"]

HEADER = struct.Struct("<QQd")
SEQUENCE = struct.Struct("<Q")
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
# maximum concurrent connections: a scraper keeps one
_MAX_CONNECTIONS = 32
# seconds a connection may be idle, and seconds between checks for that
_IDLE = 120.0
_SWEEP = 10.0
# maximum bytes of a request's line and headers
_MAX_HEAD = 16 * 1024
# seconds to wait for a connection's first bytes before it is accepted without them
_DEFER_SECONDS = 1
# reads of a text that is being replaced, which takes microseconds; other requests wait
_LOOKS = 20
_LOOK_EVERY = 1e-4

# sched_setattr(2), for which the C library has no function
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = "=IIQiIQQQ"
_SLICE_NS = 100_000


def read_text(memory: mmap.mmap) -> tuple[bytes, float] | None:
    """Return the text and its time; None if there is none, or its writer stopped halfway."""
    for _ in range(_LOOKS):
        sequence, length, made = HEADER.unpack_from(memory)
        if sequence % 2 == 0:
            text = memory[HEADER.size : HEADER.size + length]
            if SEQUENCE.unpack_from(memory)[0] == sequence:
                return (text, made) if length else None
        time.sleep(_LOOK_EVERY)
    return None


class Answers:
    """Answers requests: bytes in, bytes out, no sockets."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        # no text was readable in this round
        self._nothing = False

    def begin_round(self) -> None:
        """Let requests from here on look for a text again. Within one round a text that stays
        half-written is waited for once, not by every request."""
        self._nothing = False

    def to(self, head: bytes) -> tuple[bytes, bool]:
        """Return the answer to one request without a body, and whether the connection is kept.

        Args:
            head: request line and headers, without the empty line at the end.
        """
        line, *headers = head.split(b"\r\n")
        words = line.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _answer(400, b"this is no HTTP request\n", keep=False), False
        keep = words[2] != b"HTTP/1.0"
        # whether the next request begins at the end of this one's head
        alone = words[0] == b"GET"
        for header in headers:
            name, _, value = header.partition(b":")
            name, value = name.strip().lower(), value.strip().lower()
            if name == b"connection":
                keep = b"close" not in value and (keep or b"keep-alive" in value)
            elif name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
                alone = False
        keep = keep and alone
        return self._answer(words[0], words[1].partition(b"?")[0], keep), keep

    def _answer(self, method: bytes, path: bytes, keep: bool) -> bytes:
        if method != b"GET":
            text = b"" if method == b"HEAD" else b"only GET is served here\n"
            return _answer(501, text, keep=keep)
        if path != b"/metrics":
            return _answer(404, b"only /metrics is served here\n", keep=keep)
        found = None if self._nothing else read_text(self._memory)
        if found is None:
            self._nothing = True
            return _answer(503, b"no metrics yet\n", keep=keep)
        text, made = found
        age = b" %.3f\n" % max(0.0, time.monotonic() - made)
        return _answer(200, memoryview(text)[: text.rindex(b" ")], age, keep=keep)


_PHRASES = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}


def _answer(status: int, *body: bytes | memoryview, keep: bool) -> bytes:
    head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
        status,
        _PHRASES[status],
        CONTENT_TYPE,
        sum(map(len, body)),
        b"" if keep else b"Connection: close\r\n",
    )
    return b"".join((head, *body))


class _Connection:
    """A scraper: its unread bytes of the next request, and the unsent bytes of answers."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard_at = time.monotonic()
        self._unread = b""
        self._unsent = b""
        self._keep = True

    @property
    def waits_to_send(self) -> bool:
        return bool(self._unsent)

    def proceed(self, answers: Answers) -> bool:
        """Read, answer and send as far as possible without waiting; return whether to continue.
        Raises OSError when the scraper is gone."""
        if not self._unsent:
            try:
                data = self.socket.recv(_MAX_HEAD)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.heard_at = time.monotonic()
            self._unread += data
        while self._keep:
            if not self._unsent:
                head, found, rest = self._unread.partition(b"\r\n\r\n")
                if found and len(head) <= _MAX_HEAD:
                    self._unread = rest
                    self._unsent, self._keep = answers.to(head)
                elif len(head) > _MAX_HEAD:
                    self._unsent = _answer(431, b"too long\n", keep=False)
                    self._keep = False
                else:
                    return True
            if not self._send():
                return True
        return bool(self._unsent) and not self._send()

    def _send(self) -> bool:
        """Return whether all bytes were sent."""
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        if sent:
            self.heard_at = time.monotonic()
        self._unsent = self._unsent[sent:]
        return not self._unsent


class Exporter:
    """Answers scrapes on one thread, so that each needs one wake-up of this process. On a machine
    whose processors are all busy, wake-ups dominate the time of an answer; a thread per connection
    would add one.

    Args:
        listener: a listening socket.
    """

    def __init__(self, listener: socket.socket, memory: mmap.mmap) -> None:
        listener.setblocking(False)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            # Linux: wake up at a new connection's first request, not at the connection itself
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_SECONDS)
        self._listener = listener
        self._answers = Answers(memory)
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._selector.register(listener, selectors.EVENT_READ)

    def run_until(self, file: int) -> None:
        """Serve until ``file`` reaches its end."""
        self._selector.register(file, selectors.EVENT_READ)
        swept_at = time.monotonic()
        while True:
            ready = self._selector.select(_SWEEP)
            self._answers.begin_round()
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Connection):
                    self._proceed(key.data)
                elif not os.read(file, 4096):
                    return
            now = time.monotonic()
            if now - swept_at >= _SWEEP:
                swept_at = now
                for connection in tuple(self._connections):
                    if now - connection.heard_at >= _IDLE:
                        self._close(connection)

    def _accept(self) -> None:
        for _ in range(_MAX_CONNECTIONS):
            try:
                accepted, _address = self._listener.accept()
            except OSError:
                # no connection waits, or it was closed already
                return
            if len(self._connections) >= _MAX_CONNECTIONS:
                accepted.close()
                continue
            connection = _Connection(accepted)
            self._connections.add(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._proceed(connection)

    def _proceed(self, connection: _Connection) -> None:
        waited = connection.waits_to_send
        try:
            goes_on = connection.proceed(self._answers)
        except OSError:
            goes_on = False
        except Exception as error:
            # a bug here, which must not affect the other scrapers
            kind = type(error).__name__
            print(f"metrics_exporter_error error={kind}: {error}", file=sys.stderr, flush=True)
            goes_on = False
        if not goes_on:
            self._close(connection)
        elif connection.waits_to_send != waited:
            wanted = selectors.EVENT_READ if waited else selectors.EVENT_WRITE
            self._selector.modify(connection.socket, wanted, connection)

    def _close(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()


def ask_for_short_slices() -> bool:
    """Make the system run this process soon after it wakes, on busy processors.

    From Linux 6.12 on an ordinary thread can set its time slice (``sched_runtime`` of
    sched_setattr(2); threads started later inherit it): with a shorter slice it runs sooner, but
    gets no more of the processor. Returns whether it was granted; elsewhere nothing changes.
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
    memory = mmap.mmap(int(sys.argv[2]), 0, prot=mmap.PROT_READ)
    Exporter(listener, memory).run_until(0)


if __name__ == "__main__":
    main()
