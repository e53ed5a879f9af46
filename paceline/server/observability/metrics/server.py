"""All metrics of one app; those of HTTP under the names of prometheus-fastapi-instrumentator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from paceline.engine.types import EngineInfo, EngineStats
from paceline.http.exposition import Description, Registry, merged
from paceline.server.observability.metrics.engine import EngineMetrics
from paceline.server.observability.metrics.requests import RequestMetrics, TenantMetrics

if TYPE_CHECKING:
    from paceline.server.observability.snapshot.scrape import Scrape

__all__ = ["CONTENT_TYPE", "HttpMetrics", "ServerMetrics"]

# prometheus-fastapi-instrumentator's
_HTTP_BUCKETS: Final = (0.1, 0.5, 1.0)
_HTTP_FINE_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0,
    7.5, 10.0, 30.0, 60.0,
)  # fmt: skip


class HttpMetrics:
    """Metrics of HTTP. Labels are route templates and known methods, never a caller's text."""

    def __init__(self, registry: Registry) -> None:
        self._requests = registry.numbers(
            "counter", "http_requests", "HTTP requests.", "handler", "method", "status", constant={}
        )
        self._duration = registry.histograms(
            "http_request_duration_seconds",
            "HTTP requests, from the first to the last byte.",
            _HTTP_BUCKETS,
            "handler",
            "method",
            constant={},
        )
        self._duration_fine = registry.histograms(
            "http_request_duration_highr_seconds",
            "The same in fine buckets and without labels.",
            _HTTP_FINE_BUCKETS,
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


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE: Final = "0"
# seconds for which process metrics from the kernel are reused: reading them is slow
_PROCESS_SECONDS: Final = 1.0
# the last family of a rendering, so that an exporter can write the rendering's age behind its name
_AGE: Final = "paceline:metrics_age_seconds"


class ServerMetrics:
    """The metrics of an app, made once, used from the event loop's thread only.

    Updates cost at most a bisection; numbers of the engine and the clock are read when rendering.

    Args:
        stats: returns the engine's latest snapshot.
        model_name: the label's value; names that callers send never become labels.
        price_per_hour: cost of the machine; 0: no metrics of cost.
        ready: whether requests would be served now.
        max_tenants: tenants with series of their own in addition to ``known_tenants``. Without
            either there are no metrics of tenants.
    """

    def __init__(
        self,
        info: EngineInfo,
        stats: Callable[[], EngineStats],
        model_name: str,
        *,
        price_per_hour: float = 0.0,
        ready: Callable[[], bool],
        max_tenants: int = 0,
        known_tenants: frozenset[str] = frozenset(),
    ) -> None:
        self._stats = stats
        self._ready_now = ready
        self._price_per_hour = price_per_hour
        self._started = time.monotonic()
        # other modules may register collectors at start
        self.registry = registry = Registry({"model_name": model_name, "engine": _ENGINE})
        self._engine = EngineMetrics(registry, info, _ENGINE)
        self.requests = RequestMetrics(registry, info.max_model_len)
        # None: tenants are not counted
        self.tenants: TenantMetrics | None = None
        if max_tenants or known_tenants:
            self.tenants = TenantMetrics(registry, max_tenants, known_tenants)
        self._ready = registry.number(
            "gauge", "paceline:ready", "1 while requests are served, 0 while /health fails."
        )
        if price_per_hour:
            self._spent = registry.number(
                "counter", "paceline:cost", "Price of the time since start, in its own currency."
            )
            self._cost = registry.number(
                "gauge",
                "paceline:cost_per_million_tokens",
                "Price of the time since start by tokens served, prompt and output.",
            )
        self._http = HttpMetrics(registry)
        self._age = Registry({})
        self._age.number("gauge", _AGE, "Seconds since these numbers were put together.")
        self._process_registry = CollectorRegistry()
        ProcessCollector(registry=self._process_registry)
        # of the other models of a server that has several: rendered with these
        self.others: list[ServerMetrics] = []
        self._process_text = ""
        self._process_at = -_PROCESS_SECONDS

    @property
    def families(self) -> tuple[Description, ...]:
        """All families except those of the process, which prometheus_client defines."""
        return (*self.registry.describe(), *self._age.describe())

    @property
    def stats(self) -> EngineStats:
        """The engine's latest snapshot."""
        return self._stats()

    def observe_stats(self, stats: EngineStats) -> None:
        """Count the tokens of the engine's latest steps; call once for every snapshot."""
        self._engine.observe_steps(stats)

    def observe_http(
        self,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        *,
        request_bytes: int = 0,
        response_bytes: int = 0,
    ) -> None:
        """Count one HTTP exchange. ``handler`` is a route's template or "none"."""
        self._http.observe(
            handler,
            method,
            status,
            seconds,
            request_bytes=request_bytes,
            response_bytes=response_bytes,
        )

    def read(self) -> Scrape:
        """Return this server's own families as ``render`` shows them, without writing and parsing
        text; the time is this process's monotonic clock's."""
        from paceline.server.observability.snapshot.scrape import Scrape

        now = time.monotonic()
        self._refresh(now)
        found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for name, labels, value in self.registry.samples():
            found.setdefault(name, []).append((labels, value))
        return Scrape(now, {name: tuple(samples) for name, samples in found.items()})

    def at_start(self) -> Scrape:
        """Return the reading before anything happened."""
        from paceline.server.observability.snapshot.scrape import Scrape

        return Scrape(self._started, {})

    def render(self) -> bytes:
        """Return the text exposition format, with the age of the numbers as the last line."""
        now = time.monotonic()
        self._refresh(now)
        if now - self._process_at >= _PROCESS_SECONDS:
            self._process_text = generate_latest(self._process_registry).decode()
            self._process_at = now
        text = self.registry.render()
        if self.others:
            for other in self.others:
                other._refresh(now)
            text = merged(text, *(other.registry.render() for other in self.others))
        return (text + self._process_text + self._age.render()).encode()

    def _refresh(self, now: float) -> None:
        """Copy the numbers of the engine and the clock."""
        self._engine.update(self._stats())
        self._ready.value = float(self._ready_now())
        if self._price_per_hour:
            spent = self._price_per_hour * (now - self._started) / 3600.0
            tokens = self.requests.prompt_tokens.value + self.requests.generation_tokens.value
            self._spent.value = spent
            self._cost.value = 1e6 * spent / tokens if tokens else float("nan")
