"""HTTP answers for all errors: the one place where status codes are chosen.

The body is vLLM's: ``{"error": {"message", "type", "param", "code"}}``. Messages about the server's
own faults never hold addresses, paths or tracebacks.
"""

from __future__ import annotations

import logging
import math
import re
import traceback
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.responses import Response

from paceline.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineLostError,
    ModelFailedError,
    ModelRoomError,
    PacelineError,
    PoisonedRequestError,
    QueueFullError,
    RequestError,
    UnknownModelError,
)

__all__ = [
    "ClientDisconnectedError",
    "HttpError",
    "Reply",
    "error_body",
    "error_response",
    "reply_to",
]

_log = logging.getLogger("paceline.server")

# names of OpenAI's clients for these statuses; others use their HTTP phrase, as in vLLM
_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "BadRequestError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
}
# never sent, as the caller has gone. Only logs and metrics use it
_GONE: Final = 499
# advised wait, s, when the engine is dead, about one restart, and when no better one is known
_RESTART_SECONDS: Final = 10
# statuses whose answers always have a Retry-After
_COME_BACK: Final = (429, 503)
_STATUSES: Final = frozenset(int(status) for status in HTTPStatus)
_PRIVATE: Final = re.compile(r"0x[0-9a-fA-F]{4,}|(?<![\w:/.])/(?:[\w.@+-]+/)+[\w.@+-]*")


class HttpError(Exception):
    """A fault of the HTTP request itself, such as a body that is too long."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        # advised wait in seconds
        self.retry_after = retry_after


class ClientDisconnectedError(Exception):
    """The caller hung up before it was answered."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An error's answer to a caller."""

    status: int
    message: str
    param: str | None = None
    # seconds for the Retry-After header
    retry_after: int | None = None
    # reason why a request was dropped, for llm-d's header
    dropped: str | None = None
    # False: the caller should not retry, though the status suggests it
    should_retry: bool = True


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


def reply_to(error: BaseException, *, drain_timeout: float) -> Reply:
    """Return the answer to an error. Logs errors that are not the caller's fault.

    Args:
        drain_timeout: the advised wait, s, while the server shuts down.
    """
    match error:
        case HttpError():
            wait = error.retry_after
            if wait is None and error.status in _COME_BACK:
                wait = _RESTART_SECONDS
            return Reply(
                error.status, str(error), retry_after=None if wait is None else _seconds(wait)
            )
        case UnknownModelError():
            return Reply(404, str(error), error.param)
        case QueueFullError():
            wait = _seconds(error.retry_after)
            return Reply(429, str(error), retry_after=wait, dropped=error.reason)
        case RequestError():
            return Reply(400, str(error), error.param)
        case EngineDrainingError():
            return Reply(503, public(error), retry_after=_seconds(drain_timeout))
        case EngineLostError() | ModelFailedError():
            return Reply(503, public(error), retry_after=_seconds(error.retry_after))
        case ModelRoomError():
            return Reply(507, public(error))
        case PoisonedRequestError():
            _log.error("request_failed error=%r", public(error))
            return Reply(500, public(error), should_retry=False)
        case EngineDeadError():
            return Reply(503, public(error), retry_after=_RESTART_SECONDS)
        case ClientDisconnectedError():
            return Reply(_GONE, "the client disconnected")
        case PacelineError():
            _log.error("request_failed error=%r", public(error))
            return Reply(500, public(error))
    # a foreign exception's text may quote the prompt: a log only needs where it was raised
    _log.error(
        "uncaught type=%s at:\n%s",
        type(error).__name__,
        "".join(traceback.format_tb(error.__traceback__)).rstrip(),
    )
    return Reply(500, "the server failed on this request; its log says where")


def error_body(reply: Reply) -> bytes:
    """Return the JSON body, also sent as an event when a stream breaks."""
    status = reply.status
    kind = _TYPES.get(status)
    if kind is None:
        kind = HTTPStatus(status).phrase if status in _STATUSES else "Error"
    return msgspec.json.encode(_ErrorBody(_Error(reply.message, kind, reply.param, status)))


def error_response(reply: Reply, body: bytes | None = None) -> Response:
    """Return the answer to an error, in vLLM's shape or with a ``body`` of JSON in another."""
    headers = {} if reply.retry_after is None else {"Retry-After": str(reply.retry_after)}
    if reply.dropped is not None:
        headers["x-llm-d-request-dropped-reason"] = reply.dropped
    if not reply.should_retry:
        # OpenAI's clients read this before the status
        headers["x-should-retry"] = "false"
    if reply.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        error_body(reply) if body is None else body,
        status_code=reply.status,
        media_type="application/json",
        headers=headers,
    )


def _seconds(wait: float) -> int:
    return max(1, math.ceil(wait))


def public(error: PacelineError | str) -> str:
    """Return a message without memory addresses and file paths."""
    return _PRIVATE.sub("...", str(error))
