"""``/metrics`` on a separate listener, answered by threads of their own.

::

    event loop --render, 20 times a second--> text <--read-- one thread per connection <-- scrapes

A scrape of the server's own port waits for its turn on the event loop, behind every active stream.
One of this listener waits for the interpreter's lock alone. The text it reads is at most ``PERIOD``
old, plus the time the loop was busy, and states its age.
docs/adr/0008-metrics-listener.md has the measurement behind this choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from paceline.engine.types import EngineStats
from paceline.server.observability.metrics.server import CONTENT_TYPE, ServerMetrics

__all__ = ["PERIOD", "exporting"]

_log = logging.getLogger("paceline.server")

# seconds between renderings while the engine sends snapshots
PERIOD: Final = 0.05
# seconds between renderings without new snapshots
_IDLE_PERIOD: Final = 1.0
# maximum concurrent connections: a scraper keeps one
_MAX_CONNECTIONS: Final = 32
# seconds from one answer to the next request, and for everything else: the first request's arrival,
# a head, an answer; seconds between looks at these times
_IDLE: Final = 120.0
_BUSY: Final = 5.0
_LOOK_EVERY: Final = 0.1


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: _Exporter
    protocol_version = "HTTP/1.1"
    # what is no HTTP request gets a status line, too
    default_request_version = "HTTP/1.0"
    error_content_type = CONTENT_TYPE
    error_message_format = "%(message)s\n"
    # an answer is one write, which is sent at once
    wbufsize = -1
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        if not self.rfile.peek(1):  # type: ignore[attr-defined]
            self.close_connection = True
            return
        self.server.allow(self.connection, _BUSY)
        super().handle_one_request()
        self.server.allow(self.connection, _IDLE)

    def do_GET(self) -> None:
        """Answer one request with the latest text and its age."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is served here")
            return
        text, made = self.server.shown
        body = b"%b %.3f\n" % (text[: text.rindex(b" ")], max(0.0, time.monotonic() - made))
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            # what follows is not a request
            self.close_connection = True
            head += "Connection: close\r\n"
        # more than ``wfile`` would send at once
        self.connection.sendall(b"%b\r\n%b" % (head.encode(), body))

    def version_string(self) -> str:
        return "paceline"

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Exporter(ThreadingHTTPServer):
    """Publishes one app's metrics until ``close``. Made and closed on the event loop.

    Args:
        listener: a listening socket; the caller keeps it and closes it afterwards.
    """

    block_on_close = False

    def __init__(self, metrics: ServerMetrics, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._metrics = metrics
        # when each connection is cut; the one that has been idle longest comes first
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._publish()
        self._timer = self._loop.call_later(PERIOD, self._tick)
        self._thread = threading.Thread(target=self.serve_forever, args=(_LOOK_EVERY,), daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End the threads. The listener stays open."""
        self._timer.cancel()
        await asyncio.to_thread(self.shutdown)
        self._cut(math.inf)

    def allow(self, connection: socket.socket, seconds: float) -> None:
        """Cut the connection after ``seconds``, unless it was cut already."""
        with self._lock:
            if self._deadlines.pop(connection, None) is not None:
                self._deadlines[connection] = time.monotonic() + seconds

    def service_actions(self) -> None:
        self._cut(time.monotonic())

    def _cut(self, now: float) -> None:
        with self._lock:
            for connection in [c for c, deadline in self._deadlines.items() if deadline <= now]:
                self._shut(connection)

    def _shut(self, connection: socket.socket) -> None:
        del self._deadlines[connection]
        with contextlib.suppress(OSError):
            # its thread reads the end, and closes the socket
            connection.shutdown(socket.SHUT_RDWR)

    def verify_request(self, request: Any, client_address: object) -> bool:
        with self._lock:
            if len(self._deadlines) >= _MAX_CONNECTIONS:
                self._shut(next(iter(self._deadlines)))
            self._deadlines[request] = time.monotonic() + _BUSY
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("metrics_scrape_failed", exc_info=True)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(PERIOD, self._tick)
        if (
            self._metrics.stats is not self._shown_stats
            or time.monotonic() - self.shown[1] >= _IDLE_PERIOD
        ):
            self._publish()

    def _publish(self) -> None:
        self._shown_stats: EngineStats = self._metrics.stats
        # the latest text and its time
        self.shown = self._metrics.render(), time.monotonic()


@contextlib.asynccontextmanager
async def exporting(metrics: ServerMetrics, listener: socket.socket | None) -> AsyncGenerator[None]:
    """Serve ``metrics`` on ``listener`` within the block, then close it; None: do nothing."""
    if listener is None:
        yield
        return
    with listener:
        exporter = _Exporter(metrics, listener)
        try:
            yield
        finally:
            await exporter.close()
