"""Reading of a request's body: JSON of bounded size."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from paceline.errors import InvalidRequestError
from paceline.http.bounds import MAX_JSON_DEPTH, Bounds, check_json_depth, check_json_items
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.http.fields import check_plain, decode_object, show

__all__ = ["read_json", "read_object"]


async def read_object(request: Request, max_bytes: int, bounds: Bounds) -> dict[str, Any]:
    """Return the request's body, a JSON object of up to ``max_bytes`` and within ``bounds``.

    Raises:
        HttpError: 413, as soon as the length is known or the limit is exceeded.
        InvalidRequestError: not a JSON object, over a bound, or of another content type.
        ClientDisconnectedError: the caller hung up halfway.
    """
    value = decode_object(await read_json(request, max_bytes, bounds))
    if bounds.max_json_depth < MAX_JSON_DEPTH:
        check_json_depth(value, bounds.max_json_depth)
    return value


async def read_json(request: Request, max_bytes: int, bounds: Bounds) -> bytes:
    """Return the request's body, not yet decoded. Raises as ``read_object`` does for its size and
    content type."""
    kind = request.headers.get("content-type")
    if kind is not None and not _is_json(kind):
        raise InvalidRequestError(
            f"Content-Type must be application/json, got {show(kind)}; with curl add "
            "-H 'Content-Type: application/json'"
        )
    check_plain(request.headers.get("content-encoding", ""))
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_long(f"{declared[:20]} bytes", max_bytes)
    body = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_long(f"more than {max_bytes} bytes", max_bytes)
        more = message.get("more_body", False)
    check_json_items(body, bounds.max_json_items)
    return bytes(body)


def _is_json(kind: str) -> bool:
    media_type = kind.split(";", 1)[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def _too_long(got: str, limit: int) -> HttpError:
    return HttpError(413, f"the request body may have {limit} bytes, got {got}")
