"""Errors of engines, converted to the caller's API.

::

    OpenAI      {"error": {"message", "type", "param", "code"}}
    Anthropic   {"type": "error", "error": {"type", "message"}}

A body that already has the right shape is not changed. Otherwise the engine's own words are
extracted from the shapes that engines, clouds and frameworks use::

    FastAPI     {"detail": "..."}, {"detail": [{"loc": ["body", "top_p"], "msg": "..."}]}
    Google      [{"error": {"message", "status"}}]
    others      {"error": "..."}, {"message": "..."}, {"errors": ["..."]}, {"errors": {"top_p": ..}}
    plain text  for a caller's fault; a page of HTML comes from a proxy

Sources: https://platform.openai.com/docs/guides/error-codes,
https://docs.anthropic.com/en/api/errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from paceline.http.fields import BYTE_ORDER_MARK
from paceline.statuses import told_as

__all__ = ["Words", "anthropic_type", "map_error", "map_status", "read_words"]

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
# a status that only Anthropic's clients know
_OVERLOADED: Final = 529
# fields with an error's words, or with an object that holds them: the first non-empty one counts
_WORDS: Final = (
    "message", "msg", "detail", "errors", "error", "Message", "error_message",
    "error_description", "description", "fault", "faultstring", "reason", "title",
)  # fmt: skip
# fields that describe the kind of error
_KINDS: Final = frozenset(
    {"type", "code", "status", "param", "object", "loc", "input", "ctx", "url"}
)
_MOST_CHARS: Final = 2000
_MOST_DEPTH: Final = 6
_MOST_ITEMS: Final = 8
# lower statuses are the caller's fault
_SERVER_ERROR: Final = 500


class Words(NamedTuple):
    """An engine's words about a request that it refused."""

    # empty: nothing that the caller should see
    message: str = ""
    kind: str = ""
    code: Any = None
    param: str | None = None


def anthropic_type(status: int) -> str:
    return _TO_ANTHROPIC.get(status, "invalid_request_error" if status == 422 else "api_error")


def map_status(path: str, status: int) -> int:
    """Return an error's status as clients of that API know it."""
    is_theirs = path == "/v1/messages" and status == _OVERLOADED
    return status if is_theirs else told_as(status)


def map_error(path: str, status: int, body: bytes, code: str = "") -> bytes:
    """Return the body of an error in the API of ``path``.

    Args:
        code: checked by clients of OpenAI's API; empty: the engine's own.
    """
    fields = _decoded(body)
    anthropic = path == "/v1/messages"
    if isinstance(fields, dict):
        error = fields.get("error")
        fits = (fields.get("type") == "error") == anthropic
        told = error.get("message") if fits and isinstance(error, dict) else None
        if isinstance(error, dict) and isinstance(told, str) and _words(told, 0):
            if anthropic or not code:
                return body
            return msgspec.json.encode({**fields, "error": {**error, "code": code}})
    words = read_words(status, body)
    message = words.message or f"the engine answered with status {status}"
    if anthropic:
        shaped: Mapping[str, Any] = {
            "type": "error",
            "error": {"type": anthropic_type(status), "message": message},
        }
    else:
        shaped = {
            "error": {
                "message": message,
                "type": words.kind or anthropic_type(status),
                "param": words.param,
                "code": code or (map_status(path, status) if words.code is None else words.code),
            }
        }
    return msgspec.json.encode(shaped)


def read_words(status: int, body: bytes) -> Words:
    """Extract an error's words from any known shape."""
    fields = _decoded(body)
    if fields is None:
        return Words(_text(body)) if status < _SERVER_ERROR else Words()
    message = _words(fields, 0)
    while isinstance(fields, list) and fields:
        fields = fields[0]
    if not isinstance(fields, dict):
        return Words(message)
    found = fields
    error = fields.get("error")
    if isinstance(error, dict):
        found = error
    kind, param = found.get("type"), found.get("param")
    if param is None and isinstance(detail := found.get("detail"), list) and detail:
        param = _place(detail[0]) or None
    return Words(
        message,
        kind if isinstance(kind, str) else "",
        found.get("code"),
        param if isinstance(param, str) else None,
    )


def _decoded(body: bytes) -> Any:
    """Decode JSON; None if it is not JSON."""
    try:
        return msgspec.json.decode(body.removeprefix(BYTE_ORDER_MARK))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _text(body: bytes) -> str:
    """Return the words of a plain-text error; empty for a page, or for binary data."""
    try:
        return _shown(body.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError:
        return ""


def _shown(text: str) -> str:
    text = text.strip()
    # a truncated object has no words, and a page comes from a proxy
    if text == "null" or text.startswith(("<", "{", "[")) or "<html" in text.lower():
        return ""
    printable = all(char.isprintable() or char.isspace() for char in text[:_MOST_CHARS])
    return text[:_MOST_CHARS] if printable else ""


def _words(value: Any, depth: int) -> str:
    """Find the words in an error's value; empty if there are none."""
    if depth > _MOST_DEPTH:
        return ""
    if isinstance(value, str):
        # quoted text, such as a message, may begin with anything but a tag
        return "" if value.lstrip().startswith("<") else value.strip()[:_MOST_CHARS]
    if isinstance(value, list):
        found = (_words(item, depth + 1) for item in value[:_MOST_ITEMS])
        return "; ".join(filter(None, found))[:_MOST_CHARS]
    if not isinstance(value, dict):
        return ""
    for name in _WORDS:
        if words := _words(value.get(name), depth + 1):
            place = _place(value)
            return f"{place}: {words}" if place else words
    return _by_field(value, depth)


def _by_field(value: Mapping[str, Any], depth: int) -> str:
    """Collect words that are listed by the field they concern."""
    if not depth and not all(isinstance(item, list) for item in value.values()):
        return ""
    items = [(name, item) for name, item in value.items() if name not in _KINDS]
    found = ((name, _words(item, depth + 1)) for name, item in items[:_MOST_ITEMS])
    told = [f"{name}: {words}" for name, words in found if words]
    return "; ".join(told)[:_MOST_CHARS]


def _place(item: Any) -> str:
    """Return the field that an item of FastAPI's error concerns, as the caller knows it."""
    place = item.get("loc") if isinstance(item, dict) else None
    if not isinstance(place, list):
        return ""
    return ".".join(str(part) for part in place if part not in ("body", "query"))[:100]
