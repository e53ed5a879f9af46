"""A stream that begins before its model is in memory, so that no proxy on the way takes the
connection for dead: with comments that tell the load's progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.http.errors import ClientDisconnectedError, error_body, reply_to
from paceline.http.sse import DONE, SSE, STREAM_HEADERS, event, unless_disconnected
from paceline.server.transport.errors import anthropic_error_body
from paceline.server.transport.middleware import request_id_of

__all__ = ["BegunStream"]

# their events have names, and readers skip one without
_MESSAGES: Final = "/v1/messages"
_RESPONSES: Final = "/v1/responses"


class BegunStream(Response):
    """Comments until ``granted`` is done, then the answer.

    Args:
        granted: the wait for the model; cancelled where the caller hangs up.
        answer: makes the answer, once it is granted.
        progress: returns the part of the load that is done.
        every: seconds between comments.
    """

    def __init__(
        self,
        request: Request,
        granted: asyncio.Future[None],
        answer: Callable[[], Awaitable[Response]],
        progress: Callable[[], float],
        every: float,
    ) -> None:
        super().__init__(media_type=SSE, headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._request, self._granted, self._answer = request, granted, answer
        self._progress, self._every = progress, every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_disconnected(receive, self._wait(send))
        except ClientDisconnectedError:
            return
        finally:
            self._granted.cancel()
        try:
            await self._granted
            answer = await self._answer()
        except ClientDisconnectedError:
            return
        except Exception as error:
            await _send(send, self._failed(error))
            await _send(send, b"", more=False)
            return
        whole = answer.status_code != 200 or answer.media_type != SSE

        async def rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                return
            if whole and message.get("body"):
                # an answer that is no stream, as a refusal is
                message = {**message, "body": self._last(message["body"])}
            await send(message)

        # what writes past ``send`` would not know that the answer has begun
        await answer({**scope, "extensions": {}}, receive, rest)

    async def _wait(self, send: Send) -> None:
        while True:
            await _send(send, f": loading {self._progress():.0%}\n\n".encode())
            done, _ = await asyncio.wait((self._granted,), timeout=self._every)
            if done:
                return

    def _failed(self, error: Exception) -> bytes:
        reply = reply_to(error, drain_timeout=0.0)
        if self._request.url.path == _MESSAGES:
            return self._last(anthropic_error_body(reply, request_id_of(self._request)))
        return self._last(error_body(reply))

    def _last(self, body: bytes) -> bytes:
        """Return an error's body as the end of a stream of the API that was called."""
        path = self._request.url.path
        if path == _MESSAGES:
            return b"event: error\n" + event(body)
        if path == _RESPONSES and (found := msgspec.json.decode(body).get("error")):
            kind = "server_error" if found["code"] >= 500 else "invalid_request_error"
            about = {"code": kind, "message": found["message"], "param": found["param"]}
            whole = {"type": "error", "sequence_number": 0, **about}
            return b"event: error\n" + event(msgspec.json.encode(whole))
        return event(body) + DONE


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    message: dict[str, Any] = {"type": "http.response.body", "body": data, "more_body": more}
    await send(message)
