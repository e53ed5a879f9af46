"""An engine's error in the shape of the caller's API.

::

    OpenAI      {"error": {"message", "type", "param", "code"}}
    Anthropic   {"type": "error", "error": {"type", "message"}}

Sources: https://platform.openai.com/docs/guides/error-codes,
https://docs.anthropic.com/en/api/errors. What has the right shape already is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from paceline.statuses import told_as

__all__ = ["anthropic_type", "map_error", "map_status"]

_TO_ANTHROPIC: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# that Anthropic's clients know, and no others do
_OVERLOADED: Final = 529


def anthropic_type(status: int) -> str:
    return _TO_ANTHROPIC.get(status, "invalid_request_error" if status == 422 else "api_error")


def map_status(path: str, status: int) -> int:
    """Of an error, as clients of that API know it."""
    is_theirs = path == "/v1/messages" and status == _OVERLOADED
    return status if is_theirs else told_as(status)


def map_error(path: str, status: int, body: bytes) -> bytes:
    """The body of an error as callers of ``path`` read it."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # a page of some proxy on the way: what it says is of its own house
        fields = {}
    anthropic = path == "/v1/messages"
    error = fields.get("error")
    if isinstance(error, Mapping) and (fields.get("type") == "error") == anthropic:
        return body
    message, kind, code = _read(fields, status)
    if anthropic:
        told: Mapping[str, Any] = {
            "type": "error",
            "error": {"type": anthropic_type(status), "message": message},
        }
    else:
        told = {
            "error": {
                "message": message,
                "type": kind or anthropic_type(status),
                "param": None,
                "code": code if code is not None else map_status(path, status),
            }
        }
    return msgspec.json.encode(told)


def _read(fields: Mapping[str, Any], status: int) -> tuple[str, str, Any]:
    """Message, type and code, in whatever shape they came."""
    error = fields.get("error")
    if isinstance(error, str):
        # Ollama
        return error, "", None
    found = error if isinstance(error, Mapping) else fields
    message = found.get("message") or found.get("detail") or ""
    if not isinstance(message, str) or not message:
        message = f"the engine answered with status {status}"
    kind = found.get("type")
    return message, kind if isinstance(kind, str) else "", found.get("code")
