"""Requests that wait for their grammar, outside the scheduler.

They hold up no other request: each joins the queue, with its own arrival time, once its grammar is
compiled. This module does not know how grammars are compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from paceline.core.grammar import Grammar, MatcherSource
from paceline.core.outputs import RequestUpdate
from paceline.core.request import FinishReason
from paceline.engine.fanout import choice_ids
from paceline.engine.types import GenerationRequest
from paceline.errors import InvalidRequestError, RequestError

__all__ = ["Readiness"]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    request: GenerationRequest
    grammar: Grammar
    future: Future[None]
    deadline: float
    # time limit, s
    limit: float


class Readiness:
    """Requests that wait. Used from the engine's thread."""

    def __init__(self, matchers: MatcherSource | None) -> None:
        self._matchers = matchers
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._held)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of requests that wait for their grammar."""
        return tuple(self._held)

    def hold(self, request: GenerationRequest, now: float) -> bool:
        """Keep a request that has to wait; return False if it need not.

        Raises InvalidRequestError if grammars are not served, or this one was refused before.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return False
        if self._matchers is None:
            raise InvalidRequestError("this engine does not serve structured output", grammar.field)
        future = self._matchers.prepare(grammar)
        if future.done():
            _raise_failure(future, grammar)
            return False
        limit = self._matchers.timeout
        self._held[request.request_id] = _Held(request, grammar, future, now + limit, limit)
        return True

    def take(self, now: float) -> list[tuple[GenerationRequest, RequestError | None]]:
        """Return requests whose wait is over, in order of arrival, with refusal or None."""
        over: list[tuple[GenerationRequest, RequestError | None]] = []
        for request_id, held in list(self._held.items()):
            error: RequestError | None = None
            if held.future.done():
                try:
                    _raise_failure(held.future, held.grammar)
                except RequestError as failure:
                    error = failure
            elif now >= held.deadline:
                held.future.cancel()
                error = InvalidRequestError(
                    f"{held.grammar.field}: the grammar was not compiled within {held.limit:.1f} s",
                    held.grammar.field,
                )
            else:
                continue
            del self._held[request_id]
            over.append((held.request, error))
        return over

    def abort(self, sequence_ids: Iterable[str]) -> tuple[RequestUpdate, ...]:
        """End waiting requests with a choice among the ids; return updates of all their choices."""
        ids = set(sequence_ids)
        updates: list[RequestUpdate] = []
        for request_id, held in list(self._held.items()):
            choices = choice_ids(held.request)
            if ids.isdisjoint(choices):
                continue
            held.future.cancel()
            del self._held[request_id]
            updates += [
                RequestUpdate(choice, (), None, FinishReason.ABORT, None, 0, 0.0, 0)
                for choice in choices
            ]
        return tuple(updates)


def _raise_failure(future: Future[None], grammar: Grammar) -> None:
    """Raise the error of a finished compilation, as a fault of the request alone."""
    error = future.exception()
    if isinstance(error, RequestError):
        raise error
    if error is not None:
        # a library that crashes on a caller's grammar must not end the engine
        raise InvalidRequestError(
            f"{grammar.field}: the grammar could not be compiled ({type(error).__name__})",
            grammar.field,
        ) from error
