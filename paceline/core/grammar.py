"""What an output must look like, and the seam to whatever watches over it.

A grammar is a value that travels with a request. The engine decides where and how it is compiled,
the backend how it is applied to logits::

    request --Grammar--> engine: prepare(), off the step loop --> scheduler --> backend
                                                                                  |
                                    MatcherSource.matcher(grammar) <-- new request'
                                    TokenMatcher.consume / allowed <-- each sampled token
                                    TokenMatcher.look_ahead, forced <-- guesses of tokens

The scheduler does not look at any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from paceline.core.errors import InvalidRequestError

__all__ = ["ConstrainedBackend", "Grammar", "MatcherSource", "TokenMatcher"]

# characters, by kind; the largest schema that people generate from in public collections is below
_MAX_SOURCE: Final = {"json_schema": 1 << 18, "regex": 1 << 14, "lark": 1 << 16}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language of outputs. Equal grammars are compiled once.

    Raises:
        InvalidRequestError: an unknown kind, or a source that is too long.
    """

    # "json_schema" (JSON text), "regex" (matches the whole output) or "lark" (a grammar)
    kind: str
    source: str
    # the request field it came from, for errors
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        limit = _MAX_SOURCE.get(self.kind)
        if limit is None:
            raise InvalidRequestError(
                f"a grammar is one of {', '.join(_MAX_SOURCE)}, not {self.kind!r}", self.field
            )
        if len(self.source) > limit:
            raise InvalidRequestError(
                f"{self.field}: a {self.kind} may have {limit} characters, "
                f"this one has {len(self.source)}",
                self.field,
            )


class TokenMatcher(Protocol):
    """One output being checked against a grammar. Used from one thread at a time."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Take in sampled tokens. Raises RequestFailedError if the grammar does not allow them
        or its limits are exceeded; the matcher is of no use after that."""
        ...

    def allowed(self) -> bytes:
        """Which tokens may come next: one bit each, the lowest bit of the first byte for id 0.

        Ids beyond the last bit are not allowed. Where the output may end, the ids that end it
        are allowed too, and nothing else where it must end. Raises RequestFailedError like
        ``consume``.
        """
        ...

    def look_ahead(self, guesses: Sequence[int]) -> list[bytes]:
        """What ``allowed`` says now, and what it would say after one of the guesses, after two,
        and so on, for as long as they are tokens, are allowed and do not end the output. The
        matcher stays where it is. Raises RequestFailedError like ``allowed``; where only what
        follows a guess fails, the list ends there."""
        ...

    def forced(self, most: int) -> Sequence[int]:
        """Up to so many tokens that come next, one after the other, as no others are allowed; none
        that ends the output. The matcher stays where it is."""
        ...


class MatcherSource(Protocol):
    """Compiles grammars. Thread-safe."""

    # seconds a caller should wait for ``prepare``
    timeout: float

    def prepare(self, grammar: Grammar) -> Future[None]:
        """Compile on another thread. The future holds an InvalidRequestError if the grammar is
        not valid or too large."""
        ...

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """A matcher at the start of the output; quick for a prepared grammar. Raises
        InvalidRequestError like ``prepare``."""
        ...

    def close(self) -> None:
        """Start no more compilations. Idempotent."""
        ...


@runtime_checkable
class ConstrainedBackend(Protocol):
    """A ModelBackend that applies grammars."""

    def constrain(self, matchers: MatcherSource) -> None:
        """Called once, before the first plan with a grammar in it."""
        ...
