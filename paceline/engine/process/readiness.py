"""Requests that wait for their grammar or their adapter, outside the scheduler.

They hold up no other request: each joins the queue, with its own arrival time, once its grammar is
compiled and its adapter resident. This module does not know how that is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from paceline.core.grammar import Grammar, MatcherSource
from paceline.core.outputs import RequestUpdate
from paceline.core.pacing.request_admission import longest_wait
from paceline.core.request import FinishReason
from paceline.engine.adapters.store import AdapterStore
from paceline.engine.fanout import choice_ids
from paceline.engine.types import GenerationRequest
from paceline.errors import InvalidRequestError, QueueFullError, RequestError

__all__ = ["Readiness"]

# seconds that a request waits for its adapter at most
_ADAPTER_LIMIT: Final = 60.0
# least advised wait, s
_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    request: GenerationRequest
    # None: there is none, or it is compiled
    grammar: Grammar | None
    future: Future[None] | None
    deadline: float
    # time limit, s
    limit: float
    # time since which it waits for its adapter; None: that was resident
    since: float | None


class Readiness:
    """Requests that wait. Used from the engine's thread."""

    def __init__(
        self,
        matchers: MatcherSource | None,
        adapters: AdapterStore | None = None,
        max_predicted_ttft: float | None = None,
    ) -> None:
        self._matchers, self._adapters = matchers, adapters
        # s, ``SchedulerConfig.max_predicted_ttft_s``
        self._max_predicted_ttft = max_predicted_ttft
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._held)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of requests that wait."""
        return tuple(self._held)

    def hold(self, request: GenerationRequest, now: float) -> bool:
        """Keep a request that has to wait; return False if it need not.

        Raises RequestError if grammars or adapters are not served, or this one was refused before;
        or if the wait for its adapter is predicted to be too long.
        """
        grammar, future, limit = request.sampling.grammar, None, _ADAPTER_LIMIT
        if grammar is not None:
            if self._matchers is None:
                raise InvalidRequestError(
                    "this engine does not serve structured output", grammar.field
                )
            future = self._matchers.prepare(grammar)
            limit = self._matchers.timeout
            if future.done():
                _raise_failure(future, grammar)
                grammar = future = None
        waits, since = future is not None, None
        if request.adapter is not None:
            if self._adapters is None:
                raise InvalidRequestError("this engine does not serve adapters", "model")
            self._check_wait(request, self._adapters.wait(request.adapter))
            name, slo = request.request_id, request.slo
            due = math.inf if slo.ttft is None else request.arrival_time + slo.ttft
            self._adapters.lease(name, request.adapter, request.adapter_scale, due)
            if self._adapters.use_of(name) is None:
                waits, limit, since = True, max(limit, _ADAPTER_LIMIT), request.arrival_time
        if waits:
            held = _Held(request, grammar, future, now + limit, limit, since)
            self._held[request.request_id] = held
        return waits

    def _check_wait(self, request: GenerationRequest, wait: float) -> None:
        """Raise QueueFullError where the first token would come later than the server allows."""
        longest = longest_wait(self._max_predicted_ttft, request.slo, request.slo.ttft)
        if wait > longest and request.resume is None:
            raise QueueFullError(
                f"not accepted: its adapter is predicted to take {wait:.1f} s to be in memory, the "
                f"limit is {longest:g} s; retry in {max(_RETRY_S, wait):.1f} s",
                max(_RETRY_S, wait),
                "predicted-ttft",
            )

    def take(self, now: float) -> list[tuple[GenerationRequest, RequestError | None, float]]:
        """Return requests whose wait is over, in order of arrival: with refusal or None, and the
        seconds that they waited for their adapter."""
        over: list[tuple[GenerationRequest, RequestError | None, float]] = []
        for request_id, held in list(self._held.items()):
            error: RequestError | None = None
            try:
                if not self._is_ready(held):
                    if now < held.deadline:
                        continue
                    error = self._late(held)
            except RequestError as failure:
                error = failure
            if error is not None and held.future is not None:
                held.future.cancel()
            del self._held[request_id]
            waited = 0.0 if held.since is None else max(0.0, now - held.since)
            over.append((held.request, error, waited))
        return over

    def _is_ready(self, held: _Held) -> bool:
        """Whether a wait is over. Raises RequestError if what it is for has failed."""
        if held.future is not None and held.grammar is not None:
            if not held.future.done():
                return False
            _raise_failure(held.future, held.grammar)
        if held.request.adapter is None or self._adapters is None:
            return True
        return self._adapters.use_of(held.request.request_id) is not None

    def _late(self, held: _Held) -> RequestError:
        if held.future is not None and held.grammar is not None and not held.future.done():
            return InvalidRequestError(
                f"{held.grammar.field}: the grammar was not compiled within {held.limit:.1f} s",
                held.grammar.field,
            )
        assert self._adapters is not None
        assert held.request.adapter is not None
        return QueueFullError(
            f"there was no room for this request's adapter within {held.limit:.0f} s: try again",
            max(_RETRY_S, self._adapters.wait(held.request.adapter)),
            "queue-full",
        )

    def abort(self, sequence_ids: Iterable[str]) -> tuple[RequestUpdate, ...]:
        """End waiting requests with a choice among the ids; return updates of all their choices."""
        ids = set(sequence_ids)
        updates: list[RequestUpdate] = []
        for request_id, held in list(self._held.items()):
            choices = choice_ids(held.request)
            if ids.isdisjoint(choices):
                continue
            if held.future is not None:
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
