"""Context of one request: everything that is given before an engine is asked.

It is made once and never changed. What changes while the request runs is ``ProxiedRequest``'s.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.observability.tracing import Trace
from paceline.gateway.proxy.wake import Wake
from paceline.gateway.requests.body import Body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.requests.prompt_size import PromptSize
from paceline.gateway.routing.flow_control import FlowControl
from paceline.gateway.routing.picker import Picker
from paceline.gateway.routing.routes import Route
from paceline.gateway.settings.config import GatewayConfig
from paceline.gateway.upstreams.upstream import Upstream
from paceline.routing import Demand, HedgeBudget, RetryBudget

__all__ = ["NO_NOTE", "Allowed", "RequestContext", "Watch", "salt_of"]

# nothing was decided of a request that its caller is told
NO_NOTE: Final[Mapping[str, Any]] = {}

# called once per answer: the engine, the first bytes of a stream or a whole body, and which of both
Watch = Callable[[Upstream, bytes, bool], None]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Measures that the caller permits; header ``x-paceline-allow``."""

    retry: bool = True
    fallback: bool = True
    resume: bool = True
    hedge: bool = True
    # a small model answers where that is good enough
    cascade: bool = True

    @classmethod
    def parse(cls, value: bytes | None) -> Allowed:
        """Parse a list such as ``retry, resume``: the rest is forbidden. None allows all."""
        if value is None:
            return _ALL
        words = {word.strip().lower() for word in value.decode("latin-1").split(",")}
        return cls(*(name in words for name in _MEASURES))


_ALL: Final = Allowed()
_MEASURES: Final = ("retry", "fallback", "resume", "hedge", "cascade")


def salt_of(secret: str, tenant: str) -> str:
    """Derive a tenant's salt: the same on every gateway with ``secret``, irreversible."""
    if not secret or not tenant:
        return ""
    return hmac.digest(secret.encode(), tenant.encode(), hashlib.sha256).hex()[:32]


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it was given, and the parts of the gateway that serve it."""

    config: GatewayConfig
    picker: Picker
    flow_control: FlowControl
    # pays for every attempt after a request's first
    retry_budget: RetryBudget
    hedge_budget: HedgeBudget
    metrics: GatewayMetrics
    # clock, monotonic seconds
    now: Callable[[], float]
    incoming: IncomingRequest
    allowed: Allowed
    # cache salt of the caller's prompts, where tenants share a cache; "": none
    salt: str
    # the caller's client library is retrying, so this is not new work
    tries_again: bool
    trace: Trace
    path: str
    body: Body
    # of the prompt
    size: PromptSize
    # route of the model that the request is sent to first
    route: Route
    # the model's name as the caller knows it
    model: str
    demand: Demand
    # time of arrival, on the clock
    arrived: float
    # set when the request's task has something to do
    wake: Wake
    # sees the beginning of the answer before the caller does; None: nothing does
    watch: Watch | None = None
    # what was decided before, for the answer's headers and last chunk
    note: Mapping[str, Any] = NO_NOTE

    @property
    def names_stored(self) -> bool:
        """Whether the request names a stored object: an engine that lacks that may still have the
        model."""
        return self.body.fields.get("previous_response_id", b"null") != b"null"

    @property
    def may_hedge(self) -> bool:
        """Whether the request may be hedged: not work that can wait, nor answers that would be paid
        for several times."""
        body = self.body
        is_wanted = body.stream and self.config.hedge_share > 0
        return is_wanted and not body.slo.best_effort and body.n == 1
