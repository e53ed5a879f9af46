"""A request's grammar beside its tokens, for every backend.

The matcher reads the request's own output from the start, so one that is made anew after a
preemption reads again what was sampled before, and nothing twice. This module does not know what a
grammar is, nor logits.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    @property
    def num_read(self) -> int:
        """Output tokens the matcher has taken in."""
        return self._num_read

    def mask(self, new_tokens: Sequence[int]) -> bytes:
        """Which tokens may follow, as ``TokenMatcher.allowed`` says it.

        Args:
            new_tokens: the output from ``num_read`` on.

        Raises:
            PacelineError: the matcher failed; so does the request, and nobody else.
        """
        try:
            if self._matcher is None:
                self._matcher = self._matchers.matcher(self._grammar)
            if new_tokens:
                self._matcher.consume(new_tokens)
                self._num_read += len(new_tokens)
            return self._matcher.allowed()
        except PacelineError:
            raise
        except Exception as error:
            # whatever somebody's grammar makes the library do is that request's fault alone
            raise RequestFailedError(
                f"checking the output against its grammar failed ({type(error).__name__})"
            ) from error


def allows(mask: bytes, token_id: int) -> bool:
    """Whether ``mask`` has the token's bit."""
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
