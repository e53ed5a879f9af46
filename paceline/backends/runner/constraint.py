"""The grammar that constrains one request's output, for every backend.

The matcher reads the request's own output from the start: a matcher made again after a preemption
reads what was sampled before, and each token once. This module does not know what a grammar is, nor
logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.core.grammar import Grammar, MatcherSource, TokenMatcher
from paceline.errors import PacelineError, RequestFailedError

__all__ = ["OutputConstraint", "allows"]


class OutputConstraint:
    """One sequence's matcher, made when first needed. Used from one thread at a time."""

    def __init__(self, matchers: MatcherSource, grammar: Grammar) -> None:
        self._matchers = matchers
        self._grammar = grammar
        self._matcher: TokenMatcher | None = None
        self._num_read = 0
        # error of ``forced``, raised by the next call of ``masks``
        self._failure: PacelineError | None = None

    @property
    def num_read(self) -> int:
        """Output tokens the matcher has taken in."""
        return self._num_read

    def masks(self, new_tokens: Sequence[int], drafts: Sequence[int] = ()) -> list[bytes]:
        """Return the masks after the output and after each draft; see ``TokenMatcher.look_ahead``.

        Args:
            new_tokens: the output from ``num_read`` on.

        Raises:
            PacelineError: the matcher failed; the request fails, and no other does.
        """
        with self._failing_alone():
            if self._failure is not None:
                raise self._failure
            return self._read(new_tokens).look_ahead(drafts)

    def forced(self, new_tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return tokens that must follow (``TokenMatcher.forced``), or () where that fails. An
        error of reading the output itself is raised by the next call of ``masks``.

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
        """Turn any error of the grammar library into an error of this request alone."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            raise RequestFailedError(
                f"checking the output against its grammar failed ({type(error).__name__})"
            ) from error


def allows(mask: bytes, token_id: int) -> bool:
    """Return whether ``mask`` has the token's bit."""
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
