"""Usage that a request's key is charged for: tokens, by engine that made them.

Each token is charged once, however many attempts were made: the prompt at the first engine that
produced output, and the output at the engine that produced it. The engines' own counts are used
where they arrived. Otherwise the prompt is estimated from its bytes; each relayed part of a stream
counts as a token, as do four bytes of an answer that is not streamed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.context import RequestContext
from paceline.gateway.proxy.verdict import Verdict
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.engine_types import TEXT_PATHS, is_vectors
from paceline.gateway.settings.prices import Used
from paceline.gateway.streams.openai_stream import StreamRelay
from paceline.gateway.streams.usage import text_bytes, used_by

__all__ = ["UsageSplit"]

_BYTES_PER_TOKEN: Final = 4


@dataclass(slots=True, eq=False)
class UsageSplit:
    """Usage of one request, valid once the request is over."""

    context: RequestContext
    # relay of the streamed answer; None: it is not streamed
    relay: StreamRelay | None
    # usage as counted by an engine; None: it counted none
    counted: Used | None = None
    # see ``prompt_from``
    _cached: int | None = None
    # engines that are done, each with the answer's tokens up to its end
    _parts: list[tuple[Endpoint, int]] = field(default_factory=list)
    # usage of an attempt that is over, and its verdict: the attempt itself would point in a circle
    _last: tuple[Verdict, Used] | None = None

    @property
    def _estimate(self) -> int:
        """Estimated tokens of the prompt."""
        return round(self.context.demand.prompt_tokens)

    def prompt_from(self, cached: float) -> None:
        """Note how many tokens of the prompt were cached at the engine that computed it for another
        one: what that one takes over was computed for this request."""
        self._cached = round(cached)

    def resumes_after(self, endpoint: Endpoint) -> None:
        """Keep what ``endpoint`` made of the answer; another engine makes the rest."""
        assert self.relay is not None, "a stream goes on"
        self._parts.append((endpoint, self.relay.num_output_tokens))

    def used(self, attempt: Attempt | None) -> Used:
        """Return the usage in total; ``attempt``: the last attempt, None: no engine was asked."""
        if attempt is None:
            return Used()
        if self._last is not None and attempt.verdict is self._last[0]:
            return self._last[1]
        used = self._used(attempt)
        if attempt.verdict is not None:
            self._last = (attempt.verdict, used)
        return used

    def _used(self, attempt: Attempt) -> Used:
        return self._with_cached(self._counted_by(attempt))

    def _with_cached(self, used: Used) -> Used:
        if self._cached is None or used.cached <= self._cached:
            return used
        return replace(used, cached=self._cached)

    def _counted_by(self, attempt: Attempt) -> Used:
        # an engine worked for a caller that hung up, whether or not it had sent output
        began = attempt.was_abandoned and attempt.connection is not None
        relay = self.relay
        if relay is None or (attempt.is_answer and not attempt.streams):
            # some engines answer a request for a stream with a single body
            if not attempt.is_answer:
                return Used(self._estimate if began else 0)
            body = bytes(attempt.body)
            self.counted = used_by(self.context.path, body)
            return self.counted or self._estimated(body)
        output, prompt = relay.num_output_tokens, relay.prompt_tokens
        if prompt is not None:
            self.counted = Used(prompt, relay.cached_tokens, output)
        if prompt is None:
            # the engine died before it counted the prompt, or never counts
            prompt = self._estimate if output or began else 0
        return Used(prompt, relay.cached_tokens, output)

    def _estimated(self, body: bytes) -> Used:
        """Estimate the usage of an answer without counts."""
        path = self.context.path
        if path not in TEXT_PATHS:
            return Used(self._estimate if is_vectors(path) else 0)
        made = math.ceil(text_bytes(body) / _BYTES_PER_TOKEN)
        return Used(self._estimate, 0, max(made, self.context.body.most_deferred(path)))

    def usage_by_endpoint(self, attempt: Attempt | None) -> Sequence[tuple[Endpoint, Used]]:
        """Usage by engine, the prompt with the first one; empty if no engine answered: that costs
        nothing."""
        if attempt is None:
            return ()
        used, began = self.used(attempt), attempt.was_abandoned and attempt.connection is not None
        if not (used.output or began or attempt.is_answer):
            return ()
        if not self._parts:
            return ((attempt.endpoint, used),)
        found: list[tuple[Endpoint, Used]] = []
        before = 0
        for endpoint, until in (*self._parts, (attempt.endpoint, used.output)):
            # the engine's count of the whole answer overrules the number of relayed parts
            made = max(0, min(until, used.output) - before)
            before += made
            if not found:
                found.append((endpoint, Used(used.prompt, used.cached, made)))
            elif made:
                found.append((endpoint, Used(output=made)))
        return found
