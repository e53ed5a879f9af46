"""Spans of OpenTelemetry, sent over OTLP/HTTP, for every process that makes some.

A thread of the SDK sends them in batches, and drops what it cannot send; making a span never waits.
The caller decides whether a trace is sampled (W3C ``traceparent``), otherwise the SDK's own
environment variables do (OTEL_TRACES_SAMPLER and so on). Nothing of OpenTelemetry is imported
before ``check_endpoint``; it comes with the extra ``otel``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from paceline import __version__
from paceline.errors import ConfigError
from paceline.http.fields import show_url

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["SpanSource", "carrier_of", "check_endpoint", "clock_origin"]

# seconds for an export, and for sending the rest at the end
_EXPORT_TIMEOUT: Final = 5.0
_CLOSE_TIMEOUT: Final = 3.0
_MAX_HEADER_BYTES: Final = 512
_PROPAGATED: Final = {b"traceparent": "traceparent", b"tracestate": "tracestate"}


def check_endpoint(endpoint: str) -> str:
    """Return the URL to post spans to: ``endpoint``, plus /v1/traces if it has no path.

    Raises:
        ConfigError: not an http or https URL, or the libraries are not installed.
    """
    try:
        parts = urlsplit(endpoint)
        # a port out of range raises here
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"an OTLP endpoint is an http or https URL such as http://127.0.0.1:4318, "
            f"got {show_url(endpoint)}"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"traces need the extra otel ({error}): pip install 'paceline[otel]'"
        ) from None
    if parts.path in ("", "/"):
        return parts._replace(path="/v1/traces").geturl()
    return endpoint


def carrier_of(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Return a request's headers of W3C trace context; names in lower case."""
    return {
        _PROPAGATED[name]: value.decode("latin-1")
        for name, value in headers
        if name in _PROPAGATED and len(value) <= _MAX_HEADER_BYTES
    }


def clock_origin() -> int:
    """Return the origin of ``time.monotonic()``, in nanoseconds of the wall clock, as spans need
    it. Read once for spans that are compared, as the wall clock may be set meanwhile."""
    return time.time_ns() - time.monotonic_ns()


class SpanSource:
    """The spans of one process. ``close`` may be called on any thread.

    Args:
        endpoint: see ``check_endpoint``.
        service: its name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES give one.
        exporter: takes the spans instead.
    """

    def __init__(
        self, endpoint: str, service: str, *, exporter: SpanExporter | None = None
    ) -> None:
        url = check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        resource = resource.merge(Resource({SERVICE_VERSION: __version__}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or OTLPSpanExporter(url, timeout=_EXPORT_TIMEOUT))
        )
        self.tracer = self._provider.get_tracer("paceline", __version__)

    @staticmethod
    def parent(carrier: Mapping[str, str]) -> Context:
        """Return the context of the caller's trace if it has one; else an empty one."""
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract(carrier, Context())

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        # daemonic: an unreachable endpoint must not keep the process alive
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT)
