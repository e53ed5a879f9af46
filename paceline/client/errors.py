"""Errors with which a call ends instead of an answer.

ClientError
├── RefusedError             the server refused, and would refuse again
├── NoAnswerError            every attempt failed before the caller had anything
├── StreamInterruptedError   the caller has a part, and it cannot be resumed
└── NotParsedError           the answer is complete and not of the requested type
"""

from __future__ import annotations

__all__ = [
    "ClientError",
    "NoAnswerError",
    "NotParsedError",
    "RefusedError",
    "StreamInterruptedError",
]


class ClientError(Exception):
    """Base class of all errors of this package."""


class RefusedError(ClientError):
    """The server refused the request, with a status or as an event of the stream.

    Args:
        status: HTTP's; 200 if the stream had begun.
        message: the server's own, at most 2000 characters.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


class NoAnswerError(ClientError):
    """No attempt brought an answer, and the caller has seen no part of one.

    Args:
        reason: of the last attempt's failure.
        attempts: their number.
        status: HTTP status of the last attempt, or 0 if it got none.
        retry_after: seconds that the server asked to wait, if it did.
    """

    def __init__(
        self, reason: str, attempts: int, status: int = 0, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{reason} (attempts: {attempts})")
        self.reason = reason
        self.attempts = attempts
        self.status = status
        self.retry_after = retry_after


class StreamInterruptedError(ClientError):
    """The stream broke after ``partial``, and it cannot be resumed exactly from there.

    Args:
        reason: of the last attempt's failure.
        partial: all text that was delivered.
    """

    def __init__(self, reason: str, attempts: int, partial: str) -> None:
        super().__init__(
            f"the stream broke after {len(partial)} characters: {reason} (attempts: {attempts})"
        )
        self.reason = reason
        self.attempts = attempts
        self.partial = partial


class NotParsedError(ClientError):
    """``text`` is not of the type given as ``parse``.

    Args:
        reason: the parser's message, or how the answer ended.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"the answer does not parse: {reason}")
        self.reason = reason
        self.text = text
