"""What a dialect answers for, and OpenAI's, which changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from paceline.gateway.bodies import Body
from paceline.http.upstream import Headers

__all__ = ["Dialect", "OpenAIDialect", "Translator", "checked"]

# by endpoint, the lists of which a whole answer has one: some relays answer every API as a chat
_LISTS: Final = {
    "/v1/chat/completions": ("choices",),
    "/v1/completions": ("choices",),
    "/v1/responses": ("output", "choices"),
    "/v1/messages": ("content", "choices"),
}
# of those for vectors, one of these. They need not be objects: ranks of SGLang are a list, and
# vLLM's embeddings may be bytes (``encoding_format``)
_OF_VECTORS: Final = ("data", "results")
_NULL: Final = msgspec.Raw(b"null")


class Translator(Protocol):
    """Of one stream."""

    @property
    def is_in_long(self) -> bool:
        """Whether what was fed last is of an event that has not ended, and is no ping."""
        ...

    @property
    def between_parts(self) -> bool:
        """See ``Splice``."""
        ...

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Events of the engine in, wherever they were cut; events of the caller's API out, one
        after the other: those before one that is not of its API, which raises ValueError or
        MsgspecError, are good."""
        ...


class Dialect(Protocol):
    """Stateless: one for all requests of an engine."""

    def cannot(self, path: str, body: Body) -> str:
        """Why such a request cannot be sent there; empty where it can."""
        ...

    def target(self, path: str, model: str) -> str:
        """The path that it is sent to."""
        ...

    def headers(self, key: str) -> Headers:
        """With the engine's key."""
        ...

    def body(self, path: str, body: Body, changes: Mapping[str, Any]) -> bytes:
        """A request as the engine reads it; ``changes`` are fields of the caller's API."""
        ...

    def ignored(self, path: str, body: Body) -> str:
        """Fields of the request that the engine has no word for, with commas between them."""
        ...

    def answer(self, path: str, body: bytes) -> bytes:
        """A whole answer as the caller reads it. Raises ValueError where it is none."""
        ...

    def translator(self, path: str) -> Translator | None:
        """Of a stream; None: it needs none."""
        ...


class OpenAIDialect:
    """Of every engine that speaks as the caller does."""

    def cannot(self, path: str, body: Body) -> str:
        return ""

    def target(self, path: str, model: str) -> str:
        return path

    def headers(self, key: str) -> Headers:
        return [(b"authorization", b"Bearer " + key.encode())] if key else []

    def body(self, path: str, body: Body, changes: Mapping[str, Any]) -> bytes:
        return body.encode(changes)

    def ignored(self, path: str, body: Body) -> str:
        return ""

    def answer(self, path: str, body: bytes) -> bytes:
        return checked(path, body)

    def translator(self, path: str) -> Translator | None:
        return None


def checked(path: str, body: bytes) -> bytes:
    """A whole answer in the caller's own API, as it is. Raises ValueError for what no client of
    that API could read."""
    names = _LISTS.get(path, _OF_VECTORS)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        if names is _OF_VECTORS:
            return body
        raise
    # an empty list is an answer: nothing was found, or said
    for name in names:
        if bytes(memoryview(fields.get(name, _NULL))[:1]) == b"[":
            return body
    is_error = fields.get("error", _NULL) != _NULL
    raise ValueError("it reports an error" if is_error else f"it has no {names[0]}")
