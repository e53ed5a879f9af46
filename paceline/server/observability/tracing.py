"""OpenTelemetry traces of requests, sent over OTLP/HTTP when an endpoint is given.

::

    chat MODEL        SERVER    arrival ------------------------------------------> end
      queue           INTERNAL  arrival -> first step       paceline.waited.REASON seconds
      prefill         INTERNAL             first step -> first token
      decode          INTERNAL                           first token -> last token

Attributes follow OpenTelemetry's conventions for generative AI (``gen_ai.*``), vLLM's for latencies
(``gen_ai.latency.*``); ``paceline.*`` says what the scheduler did. Spans hold no text of prompt or
output, hence no error messages. A caller's W3C ``traceparent`` is the parent.

Spans are made when a request has ended, from the times that feed the metrics, and sent as
``http.otlp`` says. Nothing of OpenTelemetry is imported before ``Tracing`` is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Scope

from paceline.engine.types import GenerationOutput, GenerationRequest, RequestTimes, Timeline
from paceline.http.otlp import SpanSource, carrier_of, clock_origin

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["RequestTrace", "Tracing"]

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
_OTHER_OPERATION: Final = "text_completion"


@dataclass(frozen=True, slots=True)
class _Caller:
    """The origin of a request."""

    operation: str
    # W3C trace context headers
    carrier: Mapping[str, str]


# the caller of the request that the current task serves
_caller: ContextVar[_Caller] = ContextVar("caller")


class Tracing:
    """Traces of one app. Used on the event loop; ``close`` on any thread.

    Args:
        endpoint: see ``check_endpoint``.
        exporter: takes the spans instead of the endpoint.
    """

    def __init__(
        self, endpoint: str, model_name: str, *, exporter: SpanExporter | None = None
    ) -> None:
        self.spans = SpanSource(endpoint, "paceline", exporter=exporter)
        self.model_name = model_name

    def arrive(self, scope: Scope) -> None:
        """Note the caller of all requests that this task, or one it starts, runs."""
        carrier = carrier_of(scope["headers"])
        _caller.set(_Caller(_OPERATIONS.get(scope["path"], _OTHER_OPERATION), carrier))

    def follow(self, request: GenerationRequest) -> RequestTrace:
        """Return a trace of one request. Call it where ``arrive`` was called; always end it."""
        return RequestTrace(self, request, _caller.get(_Caller(_OTHER_OPERATION, {})))

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        self.spans.close()


class RequestTrace:
    """The trace of one request. Call ``output`` for every delivery, then ``end``."""

    def __init__(self, tracing: Tracing, request: GenerationRequest, caller: _Caller) -> None:
        self._tracing = tracing
        self._request = request
        self._caller = caller
        self._last: GenerationOutput | None = None
        self._finish_reasons: dict[int, str] = {}
        self._timelines: dict[int, Timeline] = {}

    def output(self, output: GenerationOutput, now: float) -> None:
        self._last = output
        for choice in output.choices:
            if choice.finish_reason is not None:
                self._finish_reasons[choice.index] = choice.finish_reason
            if choice.timeline is not None:
                self._timelines[choice.index] = choice.timeline

    def end(self, error: Exception | None, now: float) -> None:
        """Make the spans.

        Args:
            error: sent to the caller instead of an answer.
            now: seconds of ``time.monotonic()``.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        request, spans = self._request, self._tracing.spans
        tracer = spans.tracer
        origin = clock_origin()

        def at(seconds: float) -> int:
            return origin + int(seconds * 1e9)

        root = tracer.start_span(
            f"{self._caller.operation} {self._tracing.model_name}",
            spans.parent(self._caller.carrier),
            SpanKind.SERVER,
            self._attributes(now),
            start_time=at(request.arrival_time),
        )
        if error is not None:
            root.set_attribute("error.type", type(error).__name__)
            root.set_status(Status(StatusCode.ERROR))
        if root.is_recording():
            inside = set_span_in_context(root)
            for name, begins, ends, attributes in self._phases(now):
                span = tracer.start_span(
                    name, inside, SpanKind.INTERNAL, attributes, start_time=at(begins)
                )
                span.end(at(ends))
        root.end(at(now))

    def _phases(self, now: float) -> list[tuple[str, float, float, dict[str, Any]]]:
        """Return (name, begin, end, attributes) of each phase the request reached."""
        timeline, times = self._timelines.get(0), self._times()
        waited = {
            f"paceline.waited.{reason}": round(seconds, 6)
            for reason, seconds in (() if timeline is None else timeline.waited)
        }
        if times is None:
            return [("queue", self._request.arrival_time, now, waited)]
        last = self._last
        assert last is not None, "times come with outputs"
        prefill: dict[str, Any] = {
            "gen_ai.usage.input_tokens": last.num_prompt_tokens,
            "paceline.cached_tokens": last.num_cached_tokens,
        }
        decode: dict[str, Any] = {"gen_ai.usage.output_tokens": last.num_output_tokens}
        if timeline is not None:
            prefill["paceline.chunks"] = timeline.num_chunks
            decode["paceline.recomputed_tokens"] = timeline.num_recomputed_tokens
            decode["paceline.swapped_tokens"] = timeline.num_swapped_tokens
        decode["paceline.preemptions"] = last.num_preemptions
        return [
            ("queue", times.arrival, times.first_scheduled, waited),
            ("prefill", times.first_scheduled, times.first_token, prefill),
            ("decode", times.first_token, times.last_token, decode),
        ]

    def _times(self) -> RequestTimes | None:
        return None if self._last is None else self._last.times

    def _attributes(self, now: float) -> dict[str, Any]:
        request, sampling = self._request, self._request.sampling
        found: dict[str, Any] = {
            "gen_ai.operation.name": self._caller.operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": self._tracing.model_name,
            "gen_ai.response.model": self._tracing.model_name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.choice.count": request.n,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "gen_ai.latency.e2e": round(now - request.arrival_time, 6),
            "paceline.slo.class": request.slo.slo_class,
        }
        if self._finish_reasons:
            reasons = [self._finish_reasons[index] for index in sorted(self._finish_reasons)]
            found["gen_ai.response.finish_reasons"] = reasons
        if self._last is not None:
            found["gen_ai.usage.output_tokens"] = self._last.num_output_tokens
        times, timeline = self._times(), self._timelines.get(0)
        if times is not None:
            found["gen_ai.latency.time_in_queue"] = round(times.first_scheduled - times.arrival, 6)
            found["gen_ai.latency.time_to_first_token"] = round(
                times.first_token - times.arrival, 6
            )
        if timeline is not None:
            found["paceline.demoted"] = timeline.demoted
            if timeline.predicted_ttft is not None:
                found["paceline.predicted_ttft"] = round(timeline.predicted_ttft, 6)
        return found
