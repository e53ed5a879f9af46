"""OpenTelemetry traces of requests at a gateway, sent over OTLP/HTTP when an endpoint is given.

::

    chat MODEL          SERVER    arrival ---------------------------------------------> end
      queue             INTERNAL  waits for a free slot at an engine, or for a cooldown
      attempt ENGINE    CLIENT            sent -----> lost
      attempt ENGINE    CLIENT                          sent ----> first token ----> end
        (the engine's own spans: queue, prefill, decode, where it makes any)

A caller's W3C ``traceparent`` is the parent, and an engine gets that of its attempt, so that its
own spans lie inside. Attributes are named as in ``server.observability.tracing``; they never hold
prompt or output, and so no error messages. Without an endpoint ``NO_TRACING`` is used, callers'
headers go to engines unchanged, and OpenTelemetry is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.prices import Used
from paceline.http.otlp import SpanSource, carrier_of, clock_origin
from paceline.http.upstream import Headers

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

__all__ = ["NO_ATTEMPT", "NO_TRACE", "NO_TRACING", "AttemptTrace", "Trace", "Traces", "Tracing"]

_OPERATIONS: Final = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_OTHER_OPERATION: Final = "chat"
# shortest wait that gets a span, s
_LEAST_WAIT: Final = 0.001
# results that count as errors
_ERRORS: Final = frozenset({"failed", "broken"})
# entries of the answer's note -> attributes
_NOTED: Final = {
    "engine": "paceline.engine",
    "fallback": "paceline.fallback",
    "resumed": "paceline.resumed",
    "hedged": "paceline.hedged",
}


class AttemptTrace:
    """Trace of a request at one engine. This one records nothing."""

    def headers(self) -> Headers:
        """Return the headers for the engine that make this attempt the parent."""
        return []

    def first_token(self, now: float) -> None:
        return

    def end(self, result: str, status: int, num_tokens: int, now: float) -> None:
        """End the span; ``result``: done, refused, lost, or abandoned (not the engine's fault)."""


class Trace:
    """Trace of one request. Times are arguments, in seconds of ``time.monotonic()``. This one
    records nothing."""

    def attempt(
        self, endpoint: Endpoint, tokens_before: int, hedge: bool, now: float
    ) -> AttemptTrace:
        """Begin an attempt: the first, one resumed behind ``tokens_before`` tokens, or a ``hedge``
        while the first engine is silent."""
        return NO_ATTEMPT

    def waited(self, since: float, now: float) -> None:
        """Record a wait for an engine, until now."""

    def ended(self, result: str, status: int, note: Mapping[str, Any]) -> None:
        """Record the result, as metrics count it; the engine's last status (0: none); and the note
        on the answer."""

    def close(self, used: Used, now: float) -> None:
        """End the trace."""


class Traces:
    """Traces of one gateway. These record nothing."""

    def begin(self, path: str, model: str, request_id: str, headers: Headers, now: float) -> Trace:
        """Begin a request's trace; ``model``: its name in the configuration, or at an engine."""
        return NO_TRACE

    def close(self) -> None:
        """Send what is unsent, within a few seconds; from any thread."""


NO_ATTEMPT: Final = AttemptTrace()
NO_TRACE: Final = Trace()
NO_TRACING: Final = Traces()


class Tracing(Traces):
    """Traces that are exported.

    Args:
        endpoint: see ``check_endpoint``.
        exporter: takes the spans instead.
    """

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        self.spans = SpanSource(endpoint, "paceline-gateway", exporter=exporter)

    def begin(self, path: str, model: str, request_id: str, headers: Headers, now: float) -> Trace:
        operation = _OPERATIONS.get(path, _OTHER_OPERATION)
        return _Request(self.spans, operation, model, request_id, headers, now)

    def close(self) -> None:
        self.spans.close()


class _Request(Trace):
    def __init__(
        self,
        spans: SpanSource,
        operation: str,
        model: str,
        request_id: str,
        headers: Headers,
        now: float,
    ) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer = spans.tracer
        self._arrived = now
        self._origin = clock_origin()
        self._num_attempts = 0
        self._first_at: float | None = None
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model,
            "paceline.request_id": request_id,
        }
        self._span = spans.tracer.start_span(
            f"{operation} {model}",
            spans.parent(carrier_of(headers)),
            SpanKind.SERVER,
            attributes,
            start_time=self.at(now),
        )
        self._inside = set_span_in_context(self._span)

    def attempt(
        self, endpoint: Endpoint, tokens_before: int, hedge: bool, now: float
    ) -> AttemptTrace:
        from opentelemetry.trace import SpanKind

        self._num_attempts += 1
        url = urlsplit(endpoint.upstream.config.url)
        attributes: dict[str, Any] = {
            "gen_ai.request.model": endpoint.model,
            "server.address": url.hostname or "",
            "server.port": url.port or (443 if url.scheme == "https" else 80),
            "paceline.engine": endpoint.upstream.name,
            "paceline.engine_kind": endpoint.upstream.kind,
            "paceline.attempt": self._num_attempts,
            "paceline.tokens_before": tokens_before,
            "paceline.hedge": hedge,
        }
        span = self._tracer.start_span(
            f"attempt {endpoint.upstream.name}",
            self._inside,
            SpanKind.CLIENT,
            attributes,
            start_time=self.at(now),
        )
        return _Attempt(self, span, now)

    def at(self, seconds: float) -> int:
        return self._origin + int(seconds * 1e9)

    def first_token(self, now: float) -> None:
        if self._first_at is None:
            self._first_at = now

    def waited(self, since: float, now: float) -> None:
        if now - since >= _LEAST_WAIT:
            span = self._tracer.start_span("queue", self._inside, start_time=self.at(since))
            span.end(self.at(now))

    def ended(self, result: str, status: int, note: Mapping[str, Any]) -> None:
        self._span.set_attribute("paceline.result", result)
        for name, attribute in _NOTED.items():
            if name in note:
                self._span.set_attribute(attribute, note[name])
        if result in _ERRORS or (result == "refused" and status >= 500):
            _fail(self._span, result)

    def close(self, used: Used, now: float) -> None:
        found: dict[str, Any] = {
            "gen_ai.usage.input_tokens": used.prompt,
            "gen_ai.usage.output_tokens": used.output,
            "gen_ai.latency.e2e": round(now - self._arrived, 6),
            "paceline.attempts": self._num_attempts,
        }
        if self._first_at is not None:
            found["gen_ai.latency.time_to_first_token"] = round(self._first_at - self._arrived, 6)
        self._span.set_attributes(found)
        self._span.end(self.at(now))


class _Attempt(AttemptTrace):
    def __init__(self, request: _Request, span: Span, now: float) -> None:
        self._request, self._span, self._sent = request, span, now

    def headers(self) -> Headers:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    def first_token(self, now: float) -> None:
        self._request.first_token(now)
        self._span.set_attribute("gen_ai.latency.time_to_first_token", round(now - self._sent, 6))
        self._span.add_event("first_token", timestamp=self._request.at(now))

    def end(self, result: str, status: int, num_tokens: int, now: float) -> None:
        self._span.set_attribute("paceline.result", result)
        self._span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if result in ("refused", "lost"):
            _fail(self._span, result)
        self._span.end(self._request.at(now))


def _fail(span: Span, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", why)
    span.set_status(Status(StatusCode.ERROR))
