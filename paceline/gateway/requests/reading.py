"""Read a request's body, of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.types import Receive

from paceline.http.encodings import check_plain
from paceline.http.errors import ClientDisconnectedError, HttpError

__all__ = ["read_body_bytes", "read_json_bytes"]

_JSON: Final = b"application/json"


async def read_json_bytes(receive: Receive, headers: Mapping[bytes, bytes], most: int) -> bytes:
    """Read a body of type JSON. Raises HttpError 415, and as ``read_body_bytes``."""
    kind = headers.get(b"content-type", _JSON)
    if kind != _JSON and (kind := kind.partition(b";")[0].strip().lower()) != _JSON:
        shown = kind[:64].decode("latin-1")
        raise HttpError(415, f"Content-Type must be application/json, got {shown!r}")
    return await read_body_bytes(receive, headers, most)


async def read_body_bytes(receive: Receive, headers: Mapping[bytes, bytes], most: int) -> bytes:
    """Read the body. Raises HttpError 413, InvalidRequestError for a compressed one, and
    ClientDisconnectedError."""
    if encoding := headers.get(b"content-encoding"):
        check_plain(encoding.decode("latin-1"))
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > most:
        raise HttpError(413, f"the request body may have {most} bytes, got {int(declared[:20])}")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise HttpError(413, f"the request body may have {most} bytes, got more")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
