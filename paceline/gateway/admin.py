"""Routes about the gateway itself: models, health, status, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from paceline import __version__
from paceline.gateway.billing.spending import Spending
from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.routing.flow_control import FlowControl
from paceline.gateway.routing.routes import Routes
from paceline.gateway.settings.engine_types import KINDS
from paceline.gateway.upstreams.capabilities import CAPABILITIES
from paceline.gateway.upstreams.registry import Engines
from paceline.gateway.upstreams.state import state_of
from paceline.gateway.upstreams.upstream import Engine
from paceline.http.errors import HttpError
from paceline.routing import RetryBudget

__all__ = ["AdminAnswer", "AdminRoutes", "GatewayState", "as_json"]

# status, content type, body
AdminAnswer = tuple[int, str, bytes]


class GatewayState(Protocol):
    """The state that admin routes show: ``Gateway``."""

    now: Callable[[], float]
    engines: Engines
    routes: Routes
    flow_control: FlowControl
    metrics: GatewayMetrics
    budget: RetryBudget
    spending: Spending
    draining: bool
    in_flight: int


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
            "/version": lambda key: as_json(200, {"version": __version__}),
        }

    def find(self, path: str) -> Callable[[str], AdminAnswer] | None:
        """Return what answers a path, a function of the key's name; None if there is none."""
        if path.startswith("/v1/models/"):
            return lambda key: self._model(path, key)
        return self._handlers.get(path)

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
        able = [e.name for e in gateway.engines.by_name.values() if _is_able(e, now)]
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
                engine.name: {
                    **_engine(engine, now),
                    "abilities": _capabilities(engine, gateway.engines),
                }
                for engine in gateway.engines.by_name.values()
            },
            "spend": gateway.spending.status(),
        }
        return as_json(200, told)

    def _render_metrics(self, key: str) -> AdminAnswer:
        gateway = self._gateway
        gateway.metrics.spent(*gateway.spending.spent_today())
        engines = gateway.engines.by_name.values()
        text = gateway.metrics.render(engines, gateway.flow_control.num_waiting, gateway.now())
        return 200, "text/plain; version=0.0.4; charset=utf-8", text.encode()


def _is_able(engine: Engine, now: float) -> bool:
    """Whether requests are sent there, if perhaps after a wait: an engine that is full, cooling
    down, or late with a sign of life is not dead."""
    is_open = engine.breaker_state(now) == "open"
    return not (engine.draining or is_open or engine.is_unreachable or engine.is_away)


def _trouble(engine: Engine, now: float) -> str:
    models = engine.troubles(now)
    told = [why if len(engine.standings) == 1 else f"{name}: {why}" for name, why in models.items()]
    return engine.available(now) or "; ".join(told[:8]) or engine.trouble


def _engine(engine: Engine, now: float) -> Mapping[str, Any]:
    return {
        "url": engine.config.url,
        "kind": engine.kind,
        "state": state_of(engine, now),
        "trouble": _trouble(engine, now) or None,
        "breaker": engine.breaker_state(now),
        "draining": engine.draining,
        # share of the requests for it: 1, or less for a while after it came back
        "share": round(engine.share(now), 3),
        "slow": engine.load.pace.slow_since is not None,
        "rests_for": round(engine.cooldown_left(now), 1),
        "max_concurrent": engine.config.max_concurrent or None,
        "models": sorted(engine.models) if engine.models is not None else None,
        "requests": len(engine.running),
        "prefill_tokens": round(engine.load.prefill_tokens),
        "connections": len(engine.pool),
        "pressed": engine.load.pressed,
        "pressure": _pressure(engine, now),
        "lost_signals": sorted(engine.lost_signals),
        "samples": engine.load.latency.num_samples,
    }


def _capabilities(engine: Engine, engines: Engines) -> Mapping[str, Any]:
    """Describe its capabilities, each with its source: the kind's table, the engine, or a probe."""
    found, facts = engine.capabilities, engine.facts
    kind = KINDS["openai" if engine.kind == "auto" else engine.kind]
    held = {"token_ids": kind.resumes, "resume": kind.resumes, "continues": kind.continues}
    told: dict[str, Any] = {}
    for name, field in CAPABILITIES.items():
        value = getattr(found, name)
        told[field] = {
            "can": held[name] if value is None else value,
            "from": found.sources.get(name, "kind"),
        }
    if engine.config.probe == "off":
        probe = "off"
    elif engines.is_probing(engine):
        probe = "under way"
    elif engines.is_probed(engine):
        probe = "answered" if found.answered else "unanswered"
    else:
        # it has not answered anything yet
        probe = "waiting"
    return {
        "probe": probe,
        **told,
        "resumes_exactly": facts.resumes,
        "contexts": {name: model.max_model_len for name, model in (engine.models or {}).items()},
        "slots": found.slots,
        "version": found.version or None,
    }


def _pressure(engine: Engine, now: float) -> Mapping[str, Any] | None:
    """Describe the load that the engine last reported; null means not reported, which is not 0."""
    pressure = engine.load.pressure
    if pressure is None:
        return None
    fields = ("waiting", "running", "kv", "capacity_tokens", "preemptions", "level")
    told = {name: getattr(pressure, name) for name in fields}
    return {**told, "seconds_ago": round(now - pressure.at, 3)}
