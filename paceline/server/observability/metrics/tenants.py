"""Metrics per tenant, for a bounded number of tenants, because callers choose their names."""

from __future__ import annotations

from functools import partial
from typing import Final

from paceline.engine.types import GenerationOutput
from paceline.errors import QueueFullError, RequestError
from paceline.http.exposition import Registry
from paceline.server.observability.metrics.requests import RequestObserver

__all__ = ["NO_TENANT", "OTHER_TENANTS", "TenantMetrics", "TenantObserver"]

# label of requests without a tenant, and of tenants above the limit
NO_TENANT: Final = "_none"
OTHER_TENANTS: Final = "_other"


class TenantMetrics:
    """The families; ``TenantObserver`` updates them.

    Args:
        most: tenants with series of their own, in order of arrival; later ones share
            ``OTHER_TENANTS``.
        known: further tenants with series of their own, such as the names of API keys.
    """

    def __init__(self, registry: Registry, most: int, known: frozenset[str] = frozenset()) -> None:
        self._most = most + len(known)
        self._names = set(known)
        counter = partial(registry.numbers, "counter")
        self.unfinished = registry.numbers(
            "gauge", "paceline:tenant_unfinished_requests", "Requests that wait or run.", "tenant"
        )
        self.requests = counter(
            "paceline:tenant_requests", "Requests that ended, refused ones too.", "tenant"
        )
        self.goodput = counter(
            "paceline:tenant_goodput_requests", "Requests that met every target they had.", "tenant"
        )
        self.refused = counter(
            "paceline:tenant_refused_requests", "Requests refused or expired.", "tenant"
        )
        self.prompt_tokens = counter(
            "paceline:tenant_prompt_tokens", "Prompt tokens processed.", "tenant"
        )
        self.generation_tokens = counter(
            "paceline:tenant_generation_tokens", "Output tokens.", "tenant"
        )
        self.time_to_first_token = registry.histograms(
            "paceline:tenant_time_to_first_token_seconds", "Arrival to first token.", (), "tenant"
        )

    def label(self, tenant: str) -> str:
        """Return the label's value for a tenant."""
        if not tenant:
            return NO_TENANT
        if tenant not in self._names:
            if len(self._names) >= self._most:
                return OTHER_TENANTS
            self._names.add(tenant)
        return tenant

    def served(self, tenant: str) -> dict[str, float] | None:
        """Return a tenant's counts so far; None if it has no series of its own."""
        if tenant not in self._names:
            return None
        families = {
            "requests": self.requests,
            "refused": self.refused,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.generation_tokens,
        }
        return {name: family.value(tenant) for name, family in families.items()}


class TenantObserver:
    """Counts one request for its tenant at its end, from the data of ``counted``."""

    def __init__(self, metrics: TenantMetrics, tenant: str, counted: RequestObserver) -> None:
        self._metrics, self._counted = metrics, counted
        self._label = metrics.label(tenant)
        metrics.unfinished.at(self._label).value += 1

    def output(self, output: GenerationOutput, now: float) -> None:
        """Do nothing: ``counted`` sees the same output."""

    def end(self, error: Exception | None, now: float) -> None:
        """Count the request; as in ``RequestObserver.end``, one that the engine refused is not
        counted, unless admission refused it or it expired."""
        metrics, label, counted = self._metrics, self._label, self._counted
        metrics.unfinished.at(label).value -= 1
        refused = isinstance(error, QueueFullError)
        if isinstance(error, RequestError) and not refused:
            return
        metrics.requests.at(label).value += 1
        metrics.refused.at(label).value += refused
        metrics.goodput.at(label).value += counted.has_met_targets
        metrics.prompt_tokens.at(label).value += counted.num_prompt_tokens
        metrics.generation_tokens.at(label).value += counted.num_output_tokens
        if counted.ttft is not None:
            metrics.time_to_first_token.at(label).observe(counted.ttft)
