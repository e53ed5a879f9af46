"""Routes about the gateway itself: models, health, status, metrics, pools and drained engines."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from paceline import __version__
from paceline.errors import ConfigError
from paceline.gateway.billing.spending import Spending
from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.routing.data_policy import DataPolicy
from paceline.gateway.routing.flow_control import FlowControl
from paceline.gateway.routing.routes import Routes
from paceline.gateway.settings.config import GatewayConfig
from paceline.gateway.settings.engine_types import KINDS
from paceline.gateway.settings.engines import PoolMembers, parse_members
from paceline.gateway.settings.prices import show_amount
from paceline.gateway.upstreams.capabilities import CAPABILITIES
from paceline.gateway.upstreams.registry import UpstreamRegistry
from paceline.gateway.upstreams.state import state_of
from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.errors import HttpError
from paceline.http.keys import KeyRing
from paceline.routing import Demand, RetryBudget

__all__ = ["AdminAnswer", "AdminRoutes", "GatewayState", "as_json", "pool_in"]

# status, content type, body
AdminAnswer = tuple[int, str, bytes]


_log = logging.getLogger("paceline.gateway")

_SHORT: Final = Demand(100.0, 100.0, 100.0)
# body of a pool's ``PUT``
_MAX_POOL_BYTES: Final = 1 << 20
_POOL: Final = re.compile(r"/admin/pools/([^/]{1,256})")


def pool_in(path: str) -> str:
    """Return the pool that a path names; "": it names none."""
    match = _POOL.fullmatch(path)
    return match[1] if match else ""


class HasStatus(Protocol):
    """Cascades, which lie above."""

    def status(self) -> Mapping[str, Any]: ...


class GatewayState(Protocol):
    """The state that other routes than those of requests read: ``Gateway``."""

    config: GatewayConfig
    keys: KeyRing
    now: Callable[[], float]
    upstreams: UpstreamRegistry
    routes: Routes
    flow_control: FlowControl
    metrics: GatewayMetrics
    budget: RetryBudget
    spending: Spending
    policy: DataPolicy
    draining: bool
    in_flight: int

    @property
    def cascades(self) -> HasStatus: ...


def as_json(status: int, value: object) -> AdminAnswer:
    return status, "application/json", msgspec.json.encode(value)


class AdminRoutes:
    """Routes of one gateway, and what answers them."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway
        self._handlers: Mapping[str, Callable[[str], AdminAnswer]] = {
            "/v1/models": self._models,
            "/status": self._status,
            "/metrics": self._render_metrics,
            "/health": self._health,
            "/health/live": lambda key: as_json(200, {"status": "ok"}),
            "/health/ready": self._health,
            "/ping": self._health,
            "/admin/pools": lambda key: as_json(200, self._pools()),
            "/version": lambda key: as_json(200, {"version": __version__}),
        }

    def find(self, path: str) -> Callable[[str], AdminAnswer] | None:
        """Return what answers a path, a function of the key's name; None if there is none."""
        if path.startswith("/v1/models/"):
            return lambda key: self._model(path, key)
        name = pool_in(path)
        if name in self._gateway.upstreams.pools:
            return lambda key: as_json(200, self.pool(name))
        return self._handlers.get(path)

    async def set_pool(self, name: str, incoming: IncomingRequest) -> AdminAnswer:
        """Take in what a pool's controller says; answer with what is known of its engines."""
        data = await incoming.read_json(_MAX_POOL_BYTES)
        if (pool := self._gateway.upstreams.pools.get(name)) is None:
            raise HttpError(404, f"pool {name[:80]!r} was removed while its controller spoke")
        if pool.config.dns:
            raise HttpError(409, f"pool {name}: its engines are the addresses of {pool.config.dns}")
        try:
            told = parse_members(data, pool.config)
        except ConfigError as error:
            raise HttpError(400, str(error)) from None
        self.tell_pool(name, told)
        return as_json(200, self.pool(name))

    def tell_pool(self, name: str, told: PoolMembers) -> None:
        """Apply what a pool has now. Raises HttpError, see ``UpstreamRegistry.set_pool``."""
        if self._gateway.upstreams.set_pool(name, told):
            self._gateway.routes.refresh()
            _log.info(
                "pool_told pool=%s epoch=%d version=%d engines=%d draining=%d",
                name, told.epoch, told.version, len(told.engines), len(told.draining),
            )  # fmt: skip
            self._gateway.flow_control.pump()

    def drain(self, name: str, drain: bool) -> AdminAnswer:
        """Let an engine take no new requests, or take them again."""
        upstream = self._gateway.upstreams.by_name.get(name)
        if upstream is None:
            known = ", ".join(sorted(self._gateway.upstreams.by_name))
            raise HttpError(404, f"there is no engine {name}; there are {known}")
        upstream.drain(on=drain, now=self._gateway.now())
        _log.info("engine_%s engine=%s", "drained" if drain else "undrained", name)
        return as_json(200, {"engine": name, "draining": drain, "requests": len(upstream.running)})

    def pool(self, name: str) -> Mapping[str, Any]:
        """Describe a pool as its gateway sees it, also in answer to ``PUT``."""
        gateway = self._gateway
        now, pool = gateway.now(), gateway.upstreams.pools[name]
        epoch, version = pool.known or (None, None)
        return {
            "epoch": epoch,
            "version": version,
            "seconds_ago": None if pool.known is None else round(now - pool.told_at, 3),
            "engines": {
                upstream.name: {
                    "url": upstream.config.url,
                    "up": _is_up(upstream, now),
                    "draining": upstream.draining,
                    "requests": len(upstream.running),
                    "trouble": _trouble(upstream, now),
                    # predicted for a further, short request
                    "wait": round(upstream.load.wait(_SHORT, now), 3),
                    "kv": upstream.load.pressure.kv if upstream.load.pressure else None,
                    "slots": upstream.load.pressure.slots if upstream.load.pressure else None,
                }
                for upstream in gateway.upstreams.all_of(name)
            },
        }

    def _pools(self) -> Mapping[str, Any]:
        return {"pools": {name: self.pool(name) for name in self._gateway.upstreams.pools}}

    def _models(self, key: str) -> AdminAnswer:
        return as_json(200, {"object": "list", "data": self._entries(key)})

    def _entries(self, key: str) -> list[Mapping[str, Any]]:
        gateway = self._gateway
        return [
            {
                "id": entry.id,
                "object": "model",
                "created": entry.entry.get("created", 0),
                "owned_by": entry.entry.get("owned_by", "paceline"),
                "max_model_len": entry.max_model_len,
            }
            for entry in gateway.routes.entries()
            if gateway.spending.may_use(key, entry.id)
        ]

    def _model(self, path: str, key: str) -> AdminAnswer:
        name = path[len("/v1/models/") :]
        for entry in self._entries(key):
            if entry["id"] == name:
                return as_json(200, entry)
        raise HttpError(404, f"The model {name[:200]!r} does not exist here")

    def _health(self, key: str) -> AdminAnswer:
        gateway = self._gateway
        now = gateway.now()
        able = [e.name for e in gateway.upstreams.by_name.values() if _is_able(e, now)]
        if gateway.draining or not able:
            why = "shutting down" if gateway.draining else "no engine can take requests"
            raise HttpError(503, why, 1.0)
        return as_json(200, {"status": "ok", "engines": able})

    def _status(self, key: str) -> AdminAnswer:
        gateway = self._gateway
        now = gateway.now()
        told = {
            "version": __version__,
            "in_flight": gateway.in_flight,
            "waiting": gateway.flow_control.num_waiting,
            "draining": gateway.draining,
            "retry_budget": round(gateway.budget.left(now), 1),
            "engines": {
                upstream.name: {
                    **_upstream(upstream, now),
                    "pool": upstream.pool_name or None,
                    "capabilities": _capabilities(upstream, gateway.upstreams),
                }
                for upstream in gateway.upstreams.by_name.values()
            },
            # seconds since each was heard; null: not yet
            "pools": {
                name: None if pool.known is None else round(now - pool.told_at, 3)
                for name, pool in gateway.upstreams.pools.items()
            },
            "currency": gateway.spending.currency,
            "spend": gateway.spending.status(),
            # since the gateway began
            "models": {
                name: {"spent": show_amount(amount)}
                for name, amount in gateway.spending.by_model.items()
            },
            "cascades": gateway.cascades.status(),
        }
        return as_json(200, told)

    def _render_metrics(self, key: str) -> AdminAnswer:
        gateway = self._gateway
        gateway.metrics.spent(*gateway.spending.spent_today(), gateway.spending.by_model)
        now = gateway.now()
        for name, pool in gateway.upstreams.pools.items():
            heard = pool.known is not None
            gateway.metrics.pool_told(name, now - pool.told_at if heard else float("nan"))
        upstreams = gateway.upstreams.by_name.values()
        text = gateway.metrics.render(upstreams, gateway.flow_control.num_waiting, now)
        return 200, "text/plain; version=0.0.4; charset=utf-8", text.encode()


def _is_able(upstream: Upstream, now: float) -> bool:
    """Whether requests are sent there, if perhaps after a wait: an engine that is full, cooling
    down, or late with a sign of life is not dead."""
    is_open = upstream.breaker_state(now) == "open"
    return not (upstream.draining or is_open or upstream.is_unreachable or upstream.is_away)


def _is_up(upstream: Upstream, now: float) -> bool:
    """Whether it answers, has told its models, and does not fail its requests: an engine that is
    full, cooling down or drained is up, and its controller is not to replace it."""
    answers = upstream.models is not None and not upstream.trouble
    return answers and upstream.breaker_state(now) != "open"


def _trouble(upstream: Upstream, now: float) -> str:
    models = upstream.troubles(now)
    told = [
        why if len(upstream.standings) == 1 else f"{name}: {why}" for name, why in models.items()
    ]
    return upstream.available(now) or "; ".join(told[:8]) or upstream.trouble


def _upstream(upstream: Upstream, now: float) -> Mapping[str, Any]:
    return {
        "url": upstream.config.url,
        "kind": upstream.kind,
        "role": upstream.role,
        "state": state_of(upstream, now),
        "trouble": _trouble(upstream, now) or None,
        "breaker": upstream.breaker_state(now),
        "draining": upstream.draining,
        # share of the requests for it: 1, or less for a while after it came back
        "share": round(upstream.share(now), 3),
        "slow": upstream.load.pace.slow_since is not None,
        "cooldown_left_s": round(upstream.cooldown_left(now), 1),
        "max_concurrent": upstream.config.max_concurrent or None,
        "models": sorted(upstream.models) if upstream.models is not None else None,
        "requests": len(upstream.running),
        "prefill_tokens": round(upstream.load.prefill_tokens),
        "connections": len(upstream.pool),
        "memory_pressure": upstream.load.pressed,
        "pressure": _pressure(upstream, now),
        "lost_signals": sorted(upstream.lost_signals),
        "samples": upstream.load.latency.num_samples,
    }


def _capabilities(upstream: Upstream, upstreams: UpstreamRegistry) -> Mapping[str, Any]:
    """Describe its capabilities, each with its source: the kind's table, the engine, or a probe."""
    found, facts = upstream.capabilities, upstream.facts
    kind = KINDS["openai" if upstream.kind == "auto" else upstream.kind]
    held = {"token_ids": kind.resumes, "resume": kind.resumes, "continues": kind.continues}
    told: dict[str, Any] = {}
    for name, field in CAPABILITIES.items():
        value = getattr(found, name)
        told[field] = {
            "can": held[name] if value is None else value,
            "from": found.sources.get(name, "kind"),
        }
    if upstream.config.probe == "off":
        probe = "off"
    elif upstreams.is_probing(upstream):
        probe = "under way"
    elif upstreams.is_probed(upstream):
        probe = "answered" if found.answered else "unanswered"
    else:
        # it has not answered anything yet
        probe = "waiting"
    return {
        "probe": probe,
        **told,
        "resumes_exactly": facts.resumes,
        "contexts": {name: model.max_model_len for name, model in (upstream.models or {}).items()},
        "slots": found.slots,
        "version": found.version or None,
    }


def _pressure(upstream: Upstream, now: float) -> Mapping[str, Any] | None:
    """Describe the load that the engine last reported; null means not reported, which is not 0."""
    pressure = upstream.load.pressure
    if pressure is None:
        return None
    fields = ("waiting", "running", "kv", "capacity_tokens", "preemptions", "level")
    told = {name: getattr(pressure, name) for name in fields}
    return {**told, "seconds_ago": round(now - pressure.at, 3)}
