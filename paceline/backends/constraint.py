"""A request's grammar beside its tokens, for every backend.

The matcher reads the request's own output from the start, so one that is made anew after a
preemption reads again what was sampled before, and nothing twice. This module does not know what a
grammar is, nor logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.core.errors import PacelineError, RequestFailedError
from paceline.core.grammar import Grammar, MatcherSource, TokenMatcher

__all__ = ["OutputConstraint", "allows"]


class OutputConstraint:
    """One sequence's matcher, made when first needed. Used from one thread at a time."""

    def __init__(self, matchers: MatcherSource, grammar: Grammar) -> None:
        self._matchers = matchers
        self._grammar = grammar
        self._matcher: TokenMatcher | None = None
        self._num_read = 0
        # of ``forced``, which nobody has been told yet
        self._failure: PacelineError | None = None

    @property
    def num_read(self) -> int:
        """Output tokens the matcher has taken in."""
        return self._num_read

    def masks(self, new_tokens: Sequence[int], guesses: Sequence[int] = ()) -> list[bytes]:
        """Which tokens may follow, and which may follow guesses; see ``TokenMatcher.look_ahead``.

        Args:
            new_tokens: the output from ``num_read`` on.

        Raises:
            PacelineError: the matcher failed; so does the request, and nobody else.
        """
        with self._failing_alone():
            if self._failure is not None:
                raise self._failure
            return self._read(new_tokens).look_ahead(guesses)

    def forced(self, new_tokens: Sequence[int], most: int) -> Sequence[int]:
        """What must follow; see ``TokenMatcher.forced``; nothing where that fails. What the tokens
        themselves do wrong fails with the next call of ``masks``.

        Args:
            new_tokens: the output from ``num_read`` on.
        """
        try:
            with self._failing_alone():
                matcher = self._read(new_tokens)
        except PacelineError as error:
            self._failure = error
            return ()
        try:
            with self._failing_alone():
                return matcher.forced(most)
        except PacelineError:
            return ()

    def _read(self, new_tokens: Sequence[int]) -> TokenMatcher:
        if self._matcher is None:
            self._matcher = self._matchers.matcher(self._grammar)
        if new_tokens:
            self._matcher.consume(new_tokens)
            self._num_read += len(new_tokens)
        return self._matcher

    @staticmethod
    @contextmanager
    def _failing_alone() -> Iterator[None]:
        """Whatever somebody's grammar makes the library do is that request's fault alone."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            raise RequestFailedError(
                f"checking the output against its grammar failed ({type(error).__name__})"
            ) from error


def allows(mask: bytes, token_id: int) -> bool:
    """Whether ``mask`` has the token's bit."""
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
