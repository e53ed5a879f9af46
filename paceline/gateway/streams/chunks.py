"""Events of chat and completions streams: chunks, errors of the engine, and empty ones."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from paceline.wire.sse import PINGS, names_error

__all__ = [
    "Choice",
    "Chunk",
    "ReportedError",
    "read_chunk",
    "says_error",
    "with_choices",
    "without_ids",
]

# `"token_ids":[1,2]` with a comma on either side. Inside a string every quote is escaped, so this
# never matches text
_IDS: Final = re.compile(rb',\s*"(?:prompt_)?token_ids":\s*(?:\[[^\]]*\]|null)')
_IDS_FIRST: Final = re.compile(rb'"(?:prompt_)?token_ids":\s*(?:\[[^\]]*\]|null),?')


def without_ids(payload: bytes) -> bytes:
    """Remove ``token_ids`` and ``prompt_token_ids`` from a chunk."""
    start = payload.find(b',"token_ids":[')
    if start >= 0:
        # nearly all chunks have one such list
        payload = payload[:start] + payload[payload.find(b"]", start) + 1 :]
    if b"token_ids" in payload:
        payload = _IDS_FIRST.sub(b"", _IDS.sub(b"", payload))
    return payload


class _Delta(msgspec.Struct):
    role: str | None = None
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None

    @property
    def says(self) -> bool:
        return bool(
            self.content
            or self.tool_calls
            or self.reasoning_content
            or self.reasoning
            or self.function_call
            or self.refusal
        )

    @property
    def says_alone(self) -> Any:
        """The text of a delta that holds nothing else, else None."""
        others = (
            self.role, self.tool_calls, self.reasoning_content, self.reasoning,
            self.function_call, self.refusal,
        )  # fmt: skip
        return None if any(others) else self.content


class Choice(msgspec.Struct):
    # null means the first choice
    index: int | None = 0
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    delta: _Delta | None = None
    text: str | None = None


class Chunk(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"")
    created: msgspec.Raw = msgspec.Raw(b"")
    model: msgspec.Raw = msgspec.Raw(b"")
    choices: list[Choice] | None = None
    usage: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")
    prompt_token_ids: list[int] | None = None

    @property
    def has_usage(self) -> bool:
        return bytes(self.usage) not in _NULL


class _Typed(msgspec.Struct):
    type: Any = None
    object: Any = None


class ReportedError(Exception):
    """The engine reports in its stream that it failed."""

    def __init__(self) -> None:
        super().__init__("the engine reported an error")


_decode: Final = msgspec.json.Decoder(Chunk).decode
_NULL: Final = (b"", b"null")
# payloads without content
_NOTHING: Final = (b"", b"{}", b"null")
# event names that mark a chunk, like no name at all
_NAMES: Final = (b"", b"message")


def says_error(error: bytes) -> bool:
    """Whether a field ``error`` reports an error: some engines send an empty one for none."""
    return error not in _NULL and bool(msgspec.json.decode(error))


def read_chunk(name: bytes, payload: bytes) -> Chunk | None:
    """Decode the chunk of an event; None: it has no content, such as a ping.

    Raises ReportedError, and ValueError for data that is not a chunk.
    """
    if name and names_error(name):
        raise ReportedError
    if payload in _NOTHING:
        return None
    try:
        chunk = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if name in PINGS or (name not in _NAMES and not payload.startswith(b"{")):
            # an event of a name that readers of chunks do not know
            return None
        raise ValueError(f"the stream holds data other than chunks: {str(error)[:100]}") from None
    reported = bytes(chunk.error)
    if reported not in _NULL and says_error(reported):
        raise ReportedError
    if chunk.choices or chunk.has_usage:
        return chunk
    typed = msgspec.json.decode(payload, type=_Typed)
    if "error" in (typed.type, typed.object):
        raise ReportedError
    return None if chunk.choices is None or name in PINGS else chunk


def with_choices(payload: bytes) -> bytes:
    """Give a usage chunk whose choices are missing or null the empty list that clients expect."""
    fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "choices": []})
