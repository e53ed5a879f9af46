"""HTTP exchanges, under the names of prometheus-fastapi-instrumentator."""

from __future__ import annotations

from paceline.http.exposition import Registry
from paceline.server.observability.metrics.buckets import HTTP_BUCKETS, HTTP_FINE_BUCKETS

__all__ = ["HttpMetrics"]


class HttpMetrics:
    """Metrics of HTTP. Labels are route templates and known methods, never a caller's text."""

    def __init__(self, registry: Registry) -> None:
        self._requests = registry.numbers(
            "counter", "http_requests", "HTTP requests.", "handler", "method", "status", constant={}
        )
        self._duration = registry.histograms(
            "http_request_duration_seconds",
            "HTTP requests, from the first to the last byte.",
            HTTP_BUCKETS,
            "handler",
            "method",
            constant={},
        )
        self._duration_fine = registry.histograms(
            "http_request_duration_highr_seconds",
            "The same in fine buckets and without labels.",
            HTTP_FINE_BUCKETS,
            constant={},
        ).at()
        self._request_size = registry.histograms(
            "http_request_size_bytes",
            "Declared lengths of request bodies.",
            (),
            "handler",
            constant={},
        )
        self._response_size = registry.histograms(
            "http_response_size_bytes",
            "Bytes of answers' bodies as sent.",
            (),
            "handler",
            constant={},
        )

    def observe(
        self,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        *,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """Count one exchange. ``handler`` is a route's template or "none"."""
        self._requests.at(handler, method, f"{status // 100}xx").value += 1
        self._duration.at(handler, method).observe(seconds)
        self._duration_fine.observe(seconds)
        self._request_size.at(handler).observe(request_bytes)
        self._response_size.at(handler).observe(response_bytes)
