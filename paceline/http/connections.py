"""The HTTP protocol with bounds: on connections, on a request's head, and on the time for a request
to arrive."""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import resource
from http import HTTPStatus
from typing import Any, Final
from uuid import uuid4

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from paceline.http.body_writer import BODY_WRITER, BodyWriter
from paceline.http.bounds import Bounds
from paceline.http.errors import Reply, error_body
from paceline.http.plain import PlainProtocol
from paceline.http.slow_readers import WatchedProtocol
from paceline.wire import fast_paths

__all__ = ["Connection", "allow_open_files"]

_log = logging.getLogger("paceline.server")

# files for the engine's socket, logs, the event loop, and connections that are being refused
_OTHER_FILES: Final = 256

# minimum upload rate, bytes/s; a slower client counts as stalled
_MIN_RATE: Final = 4096
# HTTP versions; the parser also reads others, which are framed differently
_VERSIONS: Final = frozenset({"1.0", "1.1"})
_name_of: Final = operator.itemgetter(0)
# seconds after which a refused caller should retry, when another connection may have ended
_RETRY_SECONDS: Final = 1


class Connection(PlainProtocol, WatchedProtocol):
    """uvicorn's protocol, held to ``bounds``: refuses endless input, which the parser would keep in
    memory.

    A clock runs from a connection's start, and again from the first byte of every further request,
    until that request is complete: ``receive_timeout``, and a second more for every ``_MIN_RATE``
    bytes received, so that a large file has its time and a byte now and then gains none.
    """

    def __init__(self, *arguments: Any, bounds: Bounds, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds = bounds
        # time between the last byte of an answer and the first of the next request (uvicorn
        # declares whole seconds, and passes it to call_later)
        self.timeout_keep_alive = bounds.keep_alive_timeout  # type: ignore[assignment]
        # since when no request runs and none has begun; infinite: one has
        self._idle_from = math.inf
        self._in_head = True
        self._head_bytes = 0
        # whether no part of an incomplete request has come
        self._between = True
        # number of requests that began in the present data
        self._num_begun = 0
        # whether bytes of a body came in the present data
        self._body_came = False
        self._refused = False
        # the request being answered
        self._running: RequestResponseCycle | None = None
        # an answer of this connection's own, which waits for those before it
        self._parting = b""
        self._late: asyncio.TimerHandle | None = None
        self._clock_from = 0.0
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self._bounds.max_connections:
            _log.warning("connection_refused open=%d", len(self.connections) - 1)
            most = self._bounds.max_connections
            self._refuse(503, f"the server has reached its limit of {most} connections")
            return
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        if self._running is not None:
            # uvicorn only marks the newest request, which may wait behind this one
            self._running.disconnected = True
            self._running.message_event.set()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._idle_from = math.inf
        self._in_head = True
        self._between = False
        self._num_begun += 1
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        # it may have begun before the last answer ended
        self._idle_from = math.inf
        self._in_head = False
        if len(self.headers) > self._bounds.max_headers:
            # no task was started for it yet, and none will be
            most = self._bounds.max_headers
            self._refuse(431, f"a request may have {most} headers, got {len(self.headers)}")
            raise _RefusedError
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            self._refuse(400, f"a request must be of HTTP 1.1 or 1.0, got {version}")
            raise _RefusedError
        if self.parser.get_method() == b"CONNECT":
            # the data after it belongs to another protocol
            self._refuse(501, "this server is not a proxy: CONNECT is not served")
            raise _RefusedError
        hosts = [*map(_name_of, self.headers)].count(b"host")
        if hosts > 1 or (not hosts and version == "1.1"):
            # RFC 9112, 3.2: proxies on the way may have used another one
            self._refuse(400, f"a request must have one Host header, got {hosts}")
            raise _RefusedError
        super().on_headers_complete()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.scope is not self.scope:
            return
        # headers after a body are trailers, not headers of the request (RFC 9110, 6.5.1)
        self.headers = []
        if not self.pipeline:
            self._running = cycle
        if version == "1.0":
            # HTTP/1.0 has no interim answers and no chunks: an answer without a length ends with
            # its connection
            cycle.waiting_for_100_continue = False
            cycle.chunked_encoding, cycle.expected_content_length = False, _NoLength()
        elif fast_paths.are_on():
            # ASGI asks for a dict of each; this one is internal
            ours: Any = {BODY_WRITER: BodyWriter(cycle)}
            self.scope["extensions"] = ours

    def on_body(self, body: bytes) -> None:
        self._body_came, self._head_bytes = True, 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._between = True
        self._arrived()
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        between, self._num_begun, self._body_came = self._between, 0, False
        super().data_received(data)
        if self._num_begun and not self._between and not self._refused:
            # a request that arrives in one piece needs no clock
            self._start_clock()
        # after the call, as the clock may restart within it
        self._received += len(data)
        # the parser does not tell where a head after another request begins; only its rest counts
        all_of_it = not self._num_begun or (between and self._num_begun == 1)
        # everything but body bytes counts: trailers, and chunk extensions, too
        counts = not self._between and not self._body_came
        if counts and all_of_it and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > self._bounds.max_head_bytes:
                most = self._bounds.max_head_bytes
                self._refuse(431, f"the request line and headers may have {most} bytes together")

    def on_response_complete(self) -> None:
        # the request that uvicorn starts now
        self._running = self.pipeline[-1][0] if self.pipeline else None
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
        else:
            # as there, but with one timer for many answers
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            self._idle_from = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self._look_again(self.timeout_keep_alive)
        if self._parting and self._running is None:
            self._part()

    def _unset_keepalive_if_required(self) -> None:
        # data may be no request: empty lines, or the body of one that is answered already
        if self._idle_from < math.inf:
            self._idle_from = self.loop.time()

    def _look_again(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_from == math.inf:
            return
        left = self._idle_from + self.timeout_keep_alive - self.loop.time()
        if left > 0.0:
            self._look_again(left)
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(400, "this is not an HTTP request")

    def _start_clock(self) -> None:
        self._arrived()
        self._clock_from = self.loop.time()
        self._received = 0
        if self._bounds.receive_timeout:
            self._late = self.loop.call_later(self._bounds.receive_timeout, self._time_is_up)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _time_is_up(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if self.pipeline or (
            cycle is not None and not cycle.more_body and not cycle.response_complete
        ):
            # the late request was pipelined, and is read once the answer before it is complete
            self._start_clock()
            return
        earned = self._clock_from + self._received / _MIN_RATE - self.loop.time()
        if earned + self._bounds.receive_timeout > 0:
            self._late = self.loop.call_later(
                earned + self._bounds.receive_timeout, self._time_is_up
            )
            return
        self._late = None
        if not self._received or (cycle is not None and cycle.more_body and cycle.response_started):
            # no byte came, or the answer began before the request was complete
            self.transport.close()
            return
        self._refuse(
            408,
            f"the request did not arrive within {self._bounds.receive_timeout:g} s plus 1 s for "
            f"every {_MIN_RATE} bytes",
        )

    def _refuse(self, status: int, message: str) -> None:
        """Send this connection's last answer, to input that never becomes a request, after the
        answers to the requests before it."""
        self._refused = True
        self._arrived()
        if self.transport.is_closing():
            return
        running, cycle = self._running, self.cycle
        # when the head was valid, and the data after it is not
        has_cycle = cycle is not None and cycle.scope is self.scope and not self._between
        if has_cycle and cycle.response_started:
            # an answer was sent already, or part of one
            self.transport.close()
            return
        waits = running is not None and not (has_cycle and running is cycle)
        if has_cycle:
            # code that waits for the body need not answer
            cycle.disconnected = True
            cycle.message_event.set()
            if waits:
                self.pipeline.popleft()
        request_id = uuid4().hex
        client = self.client[0] if self.client else ""
        _log.info("refused id=%s status=%d client=%s", request_id, status, client)
        body = error_body(Reply(status, message))
        head = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {request_id}",
            "connection: close",
        ]
        if status == 503:
            head.append(f"retry-after: {_RETRY_SECONDS}")
        self._parting = "\r\n".join([*head, "", ""]).encode() + body
        if not waits:
            self._part()

    def _part(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self._parting)
            self.transport.close()


class _NoLength(int):
    """A stand-in for uvicorn's countdown of an answer's length: no part exceeds it, and no end is
    too early."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> int:
        return self

    def __ne__(self, other: object) -> bool:
        return False


class _RefusedError(Exception):
    """Stops the parser."""


def allow_open_files(bounds: Bounds) -> int:
    """Let this process open as many files as ``bounds.max_connections`` needs, as far as the system
    allows; return the number of connections possible."""
    wanted = bounds.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited: Any = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited or soft >= wanted:
        return bounds.max_connections
    room = max(1, soft - _OTHER_FILES)
    _log.warning(
        "max_connections_lowered from=%d to=%d open_files=%d", bounds.max_connections, room, soft
    )
    return room
