"""Grammars that outputs must match, and the interface to the library that enforces them.

A grammar is a value that travels with a request. The engine decides where and how it is compiled,
the backend how it is applied to logits::

    request --Grammar--> engine: prepare(), off the step loop --> scheduler --> backend
                                                                                  |
                                    MatcherSource.matcher(grammar) <-- new request'
                                    TokenMatcher.consume / allowed <-- each sampled token
                                    TokenMatcher.look_ahead, forced <-- draft tokens

The scheduler does not look at any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from paceline.errors import InvalidRequestError

__all__ = ["ConstrainedBackend", "Grammar", "MatcherSource", "TokenMatcher"]

# limits in characters, by kind; the largest schemas in public collections are shorter
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
            why = f"a {self.kind} may have {limit} characters, this one has {len(self.source)}"
            raise InvalidRequestError(f"{self.field}: {why}", self.field)


class TokenMatcher(Protocol):
    """One output being checked against a grammar. Used from one thread at a time."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by sampled tokens. Raises RequestFailedError if the grammar does not allow them
        or its limits are exceeded; the matcher must not be used after that."""

    def allowed(self) -> bytes:
        """Return the tokens that may come next as a bit mask: id 0 is the first byte's lowest bit.

        Ids beyond the last bit are not allowed. Where the output may end, the ids that end it are
        allowed too; where it must end, only they are. Raises RequestFailedError like ``consume``.
        """

    def look_ahead(self, drafts: Sequence[int]) -> list[bytes]:
        """Return the result of ``allowed`` now, and what it would be after the first draft token,
        after two, and so on, while these are tokens, allowed and do not end the output. The matcher
        does not advance. Raises RequestFailedError if the first mask fails; a later one ends it."""

    def forced(self, most: int) -> Sequence[int]:
        """Return up to ``most`` tokens that must come next in turn, as no others are allowed; none
        that ends the output. The matcher does not advance."""


class MatcherSource(Protocol):
    """Compiles grammars. Thread-safe."""

    # seconds that a caller should wait for ``prepare``
    timeout: float

    def prepare(self, grammar: Grammar) -> Future[None]:
        """Compile on another thread. The future holds an InvalidRequestError for a bad grammar."""

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """Return a matcher at the output's start; raise InvalidRequestError for a bad grammar."""

    def close(self) -> None:
        """Start no more compilations. Idempotent."""


@runtime_checkable
class ConstrainedBackend(Protocol):
    """A ModelBackend that applies grammars."""

    def constrain(self, matchers: MatcherSource) -> None:
        """Set the source of matchers; called once, before the first plan with a grammar in it."""
