"""HTTP/1.1 to servers: with reused connections, and callbacks instead of streams.

Data go to a ``Sink`` at once, in the callback that read them: a relayed token costs no task, queue
or turn of the event loop, and the data of one read are passed on in one piece. A sink that cannot
take more pauses the connection, and the engine's side of it fills up.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, cast
from urllib.parse import urlsplit

from paceline.wire.response import Fault, Head, ResponseReader

_log = logging.getLogger("paceline.gateway")

__all__ = ["ConnectError", "Connection", "Headers", "Origin", "Pool", "Reply", "Sink", "lines_of"]

Headers = list[tuple[bytes, bytes]]

# largest head of an answer; more than any engine sends
_MAX_HEAD_BYTES: Final = 32 * 1024
_MAX_IDLE: Final = 1024
# addresses, in addition to all link-local ones (169.254.169.254), at which clouds hand out
# credentials: AWS on IPv6, Alibaba, Azure
_CREDENTIALS: Final = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "168.63.129.16"))
)


def lines_of(headers: Headers) -> bytes:
    """Return headers as a head has them; they must hold no line breaks."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


class ConnectError(Exception):
    """No connection could be made, or it brought no answer.

    Args:
        unreachable: the other side took no connection.
    """

    def __init__(self, why: str, *, unreachable: bool = False) -> None:
        super().__init__(why)
        self.unreachable = unreachable


class Sink(Protocol):
    """Receives one answer. Exactly one of ``on_end`` and ``on_lost`` is called, last."""

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_data(self, data: bytes) -> None:
        """Take the body bytes of one read, in order, not empty."""
        ...

    def on_end(self) -> None:
        """Take note that the answer is complete."""
        ...

    def on_lost(self, why: str) -> None:
        """Take note that the connection ended before the answer did."""
        ...


class Reply(Sink, Protocol):
    """A sink whose answer is waited for; see ``Pool.ask``."""

    @property
    def ready(self) -> asyncio.Future[None]:
        """Done when enough of the answer has come; holds a ConnectError if there is none."""
        ...


_Reply = TypeVar("_Reply", bound=Reply)


@dataclass(frozen=True, slots=True)
class Origin:
    """Address of an engine."""

    host: str
    port: int
    tls: bool
    # prefix of every path, such as "" or "/api"
    base: str

    @classmethod
    def of(cls, url: str) -> Origin:
        """Parse ``http://host:8000/base``; a trailing /v1 is dropped, as paths begin with it."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/")
        return cls(
            parts.hostname or "",
            parts.port or (443 if tls else 80),
            tls,
            base[: -len("/v1")] if base.endswith("/v1") else base,
        )

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def head(self, method: str, path: str, headers: Headers, length: int | None) -> bytes:
        """Return the head of a request; ``headers`` hold no line breaks."""
        start = self.start(method, path, headers)
        return start + (b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length)

    def start(self, method: str, path: str, headers: Headers) -> bytes:
        """Return the start of a head, to which more headers are added."""
        line = f"{method} {self.base}{path} HTTP/1.1\r\nhost: {self.authority}\r\n".encode()
        return line + lines_of(headers)


class Connection(asyncio.Protocol):
    """One connection, which carries one answer at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader(_MAX_HEAD_BYTES)
        self._sink: Sink | None = None
        # number of reads with bytes of the present answer
        self.num_reads = 0
        # whether reading is paused
        self.is_paused = False
        self.idle_since = 0.0
        # closed by this side, whatever the other side did
        self._dropped = False
        # the connection has carried an answer before the present one
        self.is_used = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def leads_to_credentials(self) -> bool:
        """Whether the other side has an address at which clouds hand out machines' credentials,
        whatever the host name."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        if not isinstance(peer, tuple):
            return False
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        address = address if mapped is None else mapped
        return address.is_link_local or address in _CREDENTIALS

    def send(self, request: bytes, sink: Sink) -> None:
        """Send a request, head and body; its answer goes to ``sink``."""
        assert self._sink is None and self._transport is not None, "the connection is in use"
        self._sink = sink
        self._reader.expect()
        self.num_reads = 0
        self._transport.write(request)

    @property
    def begun(self) -> bool:
        """Whether a byte of the present answer came."""
        return self.num_reads > 0

    def pause(self) -> None:
        """Stop reading until ``resume``."""
        if self._transport is not None and self.is_open and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self.is_open and self.is_paused:
            self.is_paused = False
            self._transport.resume_reading()

    def drop(self) -> None:
        """Abort the connection: the engine sees a hang-up, and the sink gets no more calls."""
        self._sink = None
        self._dropped = True
        if self._transport is not None:
            self._transport.abort()

    # ---------------------------------------------------------------- of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the interface, but not the base class
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._drop_unsolicited()
            return
        self.num_reads += 1
        reader = self._reader
        try:
            part = reader.read_chunk(data)
            if part is not None:
                # nearly all reads of a stream
                sink.on_data(part)
                return
            for event in reader.feed(data):
                if self._sink is None:
                    # the sink has dropped the connection
                    break
                if type(event) is bytes:
                    sink.on_data(event)
                elif type(event) is Head:
                    sink.on_head(event.status, event.headers)
                elif type(event) is Fault:
                    self._lose(event.why)
                else:
                    self._end(sink)
        except Exception:
            self._sink_failed()
            return
        if reader.is_complete:
            # only now is it known whether more bytes followed the answer
            if reader.is_unsolicited:
                self._drop_unsolicited()
            elif reader.keeps_alive and self.is_open:
                self._pool.give_back(self)

    def _end(self, sink: Sink) -> None:
        self._sink = None
        if self._reader.keeps_alive:
            if self.is_paused:
                self.resume()
        elif self._transport is not None:
            self._transport.close()
        try:
            sink.on_end()
        except Exception:
            # the sink must get an end, or its request waits for ever
            _log.exception("sink_failed")
            sink.on_lost("the gateway failed on this answer")

    def _drop_unsolicited(self) -> None:
        """Drop the connection, as the next request would take these bytes for its answer."""
        if self.is_open:
            self._pool.count_unsolicited()
        self.drop()

    def _sink_failed(self) -> None:
        """Fail this request, and no other, by a fault of ours."""
        _log.exception("sink_failed")
        self._lose("the gateway failed on this answer")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_paused = False
        sink, self._sink = self._sink, None
        # without a length or chunks, the end of the connection is the end of the body
        is_end = exc is None and self._reader.ends_with_connection
        was_free = self._pool.forget(self)
        if not self._dropped and (was_free or (sink is not None and not is_end)):
            self._pool.num_lost += 1
        if sink is None:
            return
        if is_end:
            sink.on_end()
        else:
            sink.on_lost("the connection was reset" if exc else "the connection was closed")

    def _lose(self, why: str) -> None:
        sink, self._sink = self._sink, None
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.on_lost(why)


class Pool:
    """Connections to one engine; the one used last is reused first.

    Args:
        idle: seconds that a connection may be unused and still be reused.
    """

    def __init__(self, origin: Origin, *, connect_timeout: float, idle: float) -> None:
        self.origin = origin
        self.idle = idle
        self._connect_timeout = connect_timeout
        self._free: list[Connection] = []
        self._open: set[Connection] = set()
        self._tls = ssl.create_default_context() if origin.tls else None
        # connections closed for bytes that no request had asked for
        self.num_unsolicited = 0
        # signs that the other side may have ended: it took no new connection, or closed a reusable
        # one without announcing it in an answer, or in the middle of one
        self.num_lost = 0

    def __len__(self) -> int:
        return len(self._open)

    def free(self) -> Connection | None:
        """Return a connection that is open already."""
        now = time.monotonic()
        while self._free:
            connection = self._free.pop()
            if now - connection.idle_since <= self.idle and connection.is_open:
                return connection
            connection.drop()
        return None

    async def connect(self) -> Connection:
        """Open a new connection. Raises ConnectError."""
        loop = asyncio.get_running_loop()
        origin = self.origin
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self),
                    origin.host,
                    origin.port,
                    ssl=self._tls,
                    server_hostname=origin.host if self._tls else None,
                )
        except TimeoutError:
            why = f"no connection within {self._connect_timeout:g} s"
            raise ConnectError(why, unreachable=True) from None
        except (OSError, UnicodeError) as error:
            # a name that cannot be sent to a resolver is a UnicodeError
            why = getattr(error, "strerror", None) or type(error).__name__
            self.num_lost += 1
            raise ConnectError(f"no connection: {why}", unreachable=True) from None
        self._open.add(connection)
        if connection.leads_to_credentials:
            # decided by the address that answered, not by the name
            connection.drop()
            why = "no connection: its address hands out credentials in clouds"
            raise ConnectError(why, unreachable=True)
        return connection

    async def ask(
        self, request: bytes, make: Callable[[Connection], _Reply], timeout: float
    ) -> _Reply:
        """Send a request, head and body, and return its sink once that is ``ready``. The connection
        is dropped if there is no answer.

        Args:
            make: makes the sink for a connection; called again if the other side closed an idle
                connection just as it was reused.

        Raises ConnectError.
        """
        connection: Connection | None = None
        reply: _Reply | None = None
        is_answered = False
        try:
            async with asyncio.timeout(timeout):
                while not is_answered:
                    reused = self.free()
                    connection = reused or await self.connect()
                    reply = make(connection)
                    connection.send(request, reply)
                    try:
                        await reply.ready
                        is_answered = True
                    except ConnectError:
                        if reused is None or connection.begun:
                            raise
        except TimeoutError:
            # after a held-up event loop, answer and timeout arrive together: the answer counts
            if reply is None or not reply.ready.done() or reply.ready.cancelled():
                raise ConnectError(f"no answer within {timeout:g} s") from None
            reply.ready.result()
            is_answered = True
        finally:
            if connection is not None and not is_answered:
                connection.drop()
        assert reply is not None, "it is ready"
        return reply

    def give_back(self, connection: Connection) -> None:
        connection.idle_since, connection.is_used = time.monotonic(), True
        if len(self._free) < _MAX_IDLE:
            self._free.append(connection)
        else:
            connection.drop()

    def count_unsolicited(self) -> None:
        self.num_unsolicited += 1
        origin = self.origin.authority
        _log.warning("unsolicited_response origin=%s num=%d", origin, self.num_unsolicited)

    def forget(self, connection: Connection) -> bool:
        """Remove a closed connection; return whether it could have been reused."""
        self._open.discard(connection)
        if connection not in self._free:
            return False
        self._free.remove(connection)
        return time.monotonic() - connection.idle_since <= self.idle

    def close(self) -> None:
        for connection in list(self._open):
            connection.drop()
        self._free.clear()
