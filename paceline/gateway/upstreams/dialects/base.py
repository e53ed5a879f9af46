"""OpenAI's dialect, which changes nothing, and which the other dialects extend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from paceline.gateway.requests.body import Body
from paceline.http.upstream import Headers

__all__ = ["Dialect", "Translator", "checked"]

# path -> lists of which a complete answer has one: some relays answer every API as a chat
_LISTS: Final = {
    "/v1/chat/completions": ("choices",),
    "/v1/completions": ("choices",),
    "/v1/responses": ("output", "choices"),
    "/v1/messages": ("content", "choices"),
}
# the same for vectors. They need not be objects: SGLang's ranks are a list, and vLLM's embeddings
# may be bytes (``encoding_format``)
_OF_VECTORS: Final = ("data", "results")
_NULL: Final = msgspec.Raw(b"null")
_LIST: Final = ord("[")


class _Answer(msgspec.Struct):
    """The parts of a complete answer that tell whether it is one."""

    choices: msgspec.Raw = _NULL
    output: msgspec.Raw = _NULL
    content: msgspec.Raw = _NULL
    data: msgspec.Raw = _NULL
    results: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL


_decode: Final = msgspec.json.Decoder(_Answer).decode


class Translator(Protocol):
    """Translator of one stream."""

    @property
    def is_in_long(self) -> bool:
        """Whether the last data belongs to an unfinished event other than a ping."""
        ...

    @property
    def between_parts(self) -> bool:
        """Whether the next output begins a new part; see ``StreamRelay``."""
        ...

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Translate the engine's events, split anywhere, into events of the caller's API, one after
        the other. An event that is not of the engine's API raises ValueError or MsgspecError; those
        before it are valid."""
        ...


class Dialect:
    """API of one kind of engine. Stateless: one object serves all requests of an engine. This one
    is of engines that speak the caller's API."""

    def cannot(self, path: str, body: Body) -> str:
        """Return why a request cannot be sent there; empty if it can."""
        return ""

    def target(self, path: str, model: str) -> str:
        """Return the path that the request is sent to."""
        return path

    def headers(self, key: str) -> Headers:
        """Return headers with the engine's key."""
        return [(b"authorization", b"Bearer " + key.encode())] if key else []

    def body(self, path: str, body: Body, changes: Mapping[str, Any]) -> bytes:
        """Encode a request for the engine; ``changes`` are fields of the caller's API."""
        return body.encode(changes)

    def ignored(self, path: str, body: Body) -> str:
        """Return the request's fields that the engine does not know, separated by commas."""
        return ""

    def answer(self, path: str, body: bytes) -> bytes:
        """Translate a complete answer for the caller. Raises ValueError if it is not an answer."""
        return checked(path, body)

    def translator(self, path: str) -> Translator | None:
        """Make a translator for a stream; None: it needs none."""
        return None


def checked(path: str, body: bytes) -> bytes:
    """Return a complete answer unchanged. Raises ValueError if no client of the caller's API could
    read it."""
    names = _LISTS.get(path, _OF_VECTORS)
    try:
        answer = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        if names is _OF_VECTORS:
            return body
        raise
    # an empty list is an answer: nothing was found, or nothing said
    for name in names:
        if memoryview(getattr(answer, name))[0] == _LIST:
            return body
    is_error = answer.error != _NULL
    raise ValueError("it reports an error" if is_error else f"it has no {names[0]}")
