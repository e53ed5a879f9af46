"""One HTTP request at the gateway: its head, its body of bounded size, and the answer's head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from paceline.http.body_writer import BodyWriter
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.http.fields import check_plain
from paceline.http.keys import ApiKey, KeyRing, credentials
from paceline.http.rate_limits.limiter import RateLimiter, Ticket, caller_of
from paceline.http.upstream import Headers

__all__ = ["IncomingRequest"]

_JSON: Final = b"application/json"


@dataclass(slots=True, eq=False)
class IncomingRequest:
    """One HTTP request.

    Args:
        path: as in the scope.
        headers: names in lower case.
        send_on: sends a message to the caller as it is.
        common: returns headers that the gateway adds to every answer.
    """

    scope: Scope
    path: str
    headers: Mapping[bytes, bytes]
    receive: Receive
    send_on: Send
    request_id: str
    common: Callable[[], Headers]
    # fast path to the connection; None: the server has none
    writer: BodyWriter | None = None
    # None: no key is required
    key: ApiKey | None = None
    # name of the key; "" without keys
    tenant: str = ""
    # None: not rate-limited
    ticket: Ticket | None = None
    # whether the answer has begun
    started: bool = False
    # rate-limit headers of a request that is being settled; None: as they are now
    _settled: Callable[[], Headers] | None = None

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method

    def authenticate(self, keys: KeyRing) -> None:
        """Find the request's key. Raises HttpError 401 and 403."""
        self.key = keys.check(self.path, {} if keys.is_empty else credentials(self.headers))
        if self.key is not None:
            self.tenant = self.key.name

    async def enter(self, limiter: RateLimiter) -> None:
        """Count the request against its caller's rate limits. Raises HttpError 429."""
        self.ticket = limiter.ticket(caller_of(self.tenant, self.scope.get("client")))
        if self.ticket is not None:
            await limiter.enter(self.ticket)

    def settle_with(self, settled: Callable[[], Headers] | None) -> None:
        """Set what returns the rate-limit headers; None: as they are now."""
        self._settled = settled

    async def send(self, message: Message) -> None:
        """Send a message, and common headers with the head. A method, because a closure over its
        request would be a reference cycle."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self.begin()]
        await self.send_on(message)

    def begin(self) -> Headers:
        """Start the answer and return the headers that every answer has. For code that bypasses
        ``send``, which adds them itself."""
        self.started = True
        headers = [(b"x-request-id", self.request_id.encode())]
        if self._settled is not None:
            headers += self._settled()
        elif self.ticket is not None:
            headers += self.ticket.headers()
        return headers + self.common()

    async def read_json(self, most: int) -> bytes:
        """Read a body of type JSON. Raises HttpError 415, and as ``read``."""
        kind = self.headers.get(b"content-type", _JSON)
        if kind != _JSON and (kind := kind.partition(b";")[0].strip().lower()) != _JSON:
            shown = kind[:64].decode("latin-1")
            raise HttpError(415, f"Content-Type must be application/json, got {shown!r}")
        return await self.read(most)

    async def read(self, most: int) -> bytes:
        """Read the body, of at most ``most`` bytes. Raises HttpError 413, InvalidRequestError for a
        compressed one, and ClientDisconnectedError."""
        if encoding := self.headers.get(b"content-encoding"):
            check_plain(encoding.decode("latin-1"))
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > most:
            raise _too_long(most, str(int(declared[:20])))
        whole = None if self.writer is None else self.writer.take_body()
        if whole is not None:
            if len(whole) > most:
                raise _too_long(most, "more")
            return whole
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_long(most, "more")
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_long(most: int, got: str) -> HttpError:
    return HttpError(413, f"the request body may have {most} bytes, got {got}")
