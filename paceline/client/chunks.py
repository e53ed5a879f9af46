"""Parsing of a stream's event: a chunk, an error of the server, or nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from paceline.wire.sse import PINGS, name_of, names_error, payload_of

__all__ = [
    "ChunkError", "Reported", "integer_of", "list_of", "object_of", "objects_of", "read_event",
    "text_of",
]  # fmt: skip

# data without content
_NOTHING: Final = (b"{}", b"null")
# names of events that are read as chunks, like events without a name
_NAMES: Final = (b"", b"message")
_MOST_WORDS: Final = 2000


class ChunkError(ValueError):
    """A chunk does not have the form that OpenAI's API describes."""

    def __init__(self, why: str = "a chunk is malformed") -> None:
        super().__init__(why)


@dataclass(frozen=True, slots=True)
class Reported:
    """Error that the server reports in its stream."""

    # HTTP status, if the error has one
    code: int | None
    words: str


def read_event(event: bytes) -> dict[str, Any] | Reported | None:
    """Return a chunk with choices or counts, or an error; None: no content, such as a ping.

    Raises ChunkError for the end of the stream, and for malformed chunks.
    """
    payload, name = payload_of(event), name_of(event)
    if names_error(name):
        return _reported(payload or b"")
    if payload is None or payload in _NOTHING:
        return None
    if payload == b"[DONE]":
        raise ChunkError("the stream ended early")
    chunk = _decoded(payload)
    if not isinstance(chunk, dict):
        if name not in _NAMES:
            # an event with a name that readers of chunks do not know
            return None
        raise ChunkError("an event is no JSON object")
    if error := chunk.get("error"):
        return _read_error(error)
    choices = chunk.get("choices")
    if not choices and "error" in (chunk.get("object"), chunk.get("type")):
        return _read_error(chunk)
    if name in PINGS or (choices is None and not chunk.get("usage")):
        return None
    return chunk


def _decoded(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _reported(payload: bytes) -> Reported:
    """Parse an event that reports an error by its name, with any data."""
    found = _decoded(payload)
    if isinstance(found, dict):
        return _read_error(found.get("error") or found)
    return _read_error(payload.decode(errors="replace"))


def _read_error(error: object) -> Reported:
    code = error.get("code") if isinstance(error, dict) else None
    words = error.get("message") if isinstance(error, dict) else error
    if not isinstance(words, str) or not words:
        words = "an error"
    return Reported(_integer(code), words[:_MOST_WORDS])


def text_of(value: object) -> str:
    """Return a string, "" for null; raises ChunkError for others, as the functions below do."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ChunkError
    return value


def list_of(value: object) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ChunkError
    return value


def objects_of(value: object) -> list[dict[str, Any]]:
    found = list_of(value)
    if not all(isinstance(item, dict) for item in found):
        raise ChunkError
    return found


def object_of(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ChunkError
    return value


def integer_of(value: object, default: int | None = None) -> int:
    """Return an integer, ``default`` for null; without one null is malformed too."""
    found = default if value is None else _integer(value)
    if found is None:
        raise ChunkError
    return found


def _integer(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer():
        # JSON does not distinguish 1.0 from 1
        return int(value)
    return value if type(value) is int else None
