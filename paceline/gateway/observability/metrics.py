"""Metrics of the gateway; all names begin with ``paceline:gateway_``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.prices import show_amount
from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.exposition import Family, Histogram, Numbers, Registry

__all__ = ["GatewayMetrics"]

_PREFIX: Final = "paceline:gateway_"
_SECONDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


class GatewayMetrics:
    """Metrics of one gateway. Labels are names from the configuration, never callers' text."""

    def __init__(self) -> None:
        self.registry = Registry({})
        self._requests = self._counter(
            "requests",
            "Requests by their last engine and by outcome: ok, refused (by the engine), failed "
            "(no engine answered), broken (in the middle), gone (the client left).",
            "result",
        )
        self._attempts = self._counter("attempts", "Requests sent to an engine.")
        self._failures = self._counter(
            "attempt_failures", "Attempts that an engine refused or lost.", "kind"
        )
        self._resumed = self._counter("resumed", "Streams resumed at this engine.")
        self._moved = self._counter(
            "moved",
            "Requests that left this engine for another one because its pool's controller asked.",
        )
        self._handed = self._counter(
            "handed",
            "Prompts that this engine was to compute for another one: handed (that one went on), "
            "stayed (none had room, and this one made the answer), failed (computed elsewhere).",
            "result",
        )
        self._fallbacks = self._counter("fallbacks", "Requests sent to a later tier.")
        self._first = self._times(
            "time_to_first_token_seconds",
            "From a request's arrival to the first part of its answer.",
        )
        self._seconds = self._times("request_seconds", "From a request's arrival to its end.")
        self._up = self._gauge("engine_up", "1 while the engine answers polls.")
        self._state = self._gauge(
            "breaker_open", "1 while a breaker of the engine is open: its own, or that of a model."
        )
        self._opened = self._gauge(
            "breaker_opened", "Times that breakers of the engine have opened."
        )
        self._unsolicited = self._counter(
            "unsolicited_responses",
            "Connections closed because bytes arrived that belong to no request; the next request "
            "would have taken them for its answer.",
        )
        self._running = self._gauge("requests_running", "Requests at the engine.")
        self._waiting = self.registry.number(
            "gauge",
            f"{_PREFIX}requests_waiting",
            "Requests that wait for a free slot at an engine.",
        )
        self._kv = self._gauge(
            "kv_cache_usage",
            "Share of the engine's KV cache in use, as it last reported; NaN: not reported.",
        )
        self._pressed = self._gauge("engine_memory_pressure", "1 while the engine lacks memory.")
        self._share = self._gauge(
            "engine_share",
            "Share of its requests that the engine gets: for a while below 1 after it came back.",
        )
        self._slow = self._gauge(
            "engine_slow",
            "1 while the engine's first tokens take several times longer than usual for it.",
        )
        self._firsts = self._counter("first_tokens", "First tokens of streams.")
        self._first_seconds = self._counter(
            "first_token_seconds",
            "Seconds from sending requests to their first tokens: predicted when they were sent, "
            "and actual.",
            "kind",
        )
        self._hedges = self._counter(
            "hedges",
            "Requests sent to a second engine because the first token was late: won, lost, failed.",
            "result",
        )
        self._cascaded = self._of_model(
            "counter",
            "cascade_requests",
            "Requests of a model with a cascade: small (the small model answered), escalated (the "
            "large one did, after the small one), large (the large one alone).",
            "answered_by",
        )
        self._wasted = self._of_model(
            "counter",
            "cascade_wasted_tokens",
            "Output tokens of the small model that no caller got.",
        )
        self._drift = self._of_model(
            "gauge",
            "cascade_drift",
            "Distance of a cascade's latest 200 scores from those of its labels, 0 to 1.",
        )
        self._early = self._of_model(
            "counter",
            "cascade_early",
            "Requests that the large model began while a prefix was held: used, wasted.",
            "result",
        )
        self._audited = self._of_model(
            "counter", "cascade_audited", "Requests that both models of a cascade were asked."
        )
        self._audited_loss = self._of_model(
            "gauge",
            "cascade_audited_loss",
            "Share of the latest 400 audited requests whose small answer differs from the large "
            "model's and would have been sent.",
        )
        self._alarm = self._of_model(
            "gauge",
            "cascade_alarm",
            "1 while audited requests lose more than the bound, by more than chance.",
        )
        self._saved = self._of_model(
            "gauge",
            "cascade_saved",
            "Spending that a cascade has saved: what the large model would have cost for the small "
            "one's answers, without what the small one cost, in the configuration's currency.",
        )
        self._pool_age = self.registry.numbers(
            "gauge",
            f"{_PREFIX}pool_age_seconds",
            "Seconds since the pool's controller was last heard; NaN: not heard yet.",
            "pool",
        )
        self._model_spend = self._of_model(
            "gauge",
            "model_spend",
            "Spending since the gateway began, by the model whose engines were asked, in the "
            "configuration's currency.",
        )
        self._spend = self.registry.numbers(
            "gauge",
            f"{_PREFIX}spend_today",
            "Spending of keys today (UTC), in the configuration's currency; key: its name in the "
            "configuration, empty for all others together.",
            "key",
        )

    def _counter(self, name: str, text: str, *labels: str) -> Numbers:
        return self.registry.numbers("counter", f"{_PREFIX}{name}", text, "engine", *labels)

    def _of_model(
        self, kind: Literal["counter", "gauge"], name: str, text: str, *labels: str
    ) -> Numbers:
        return self.registry.numbers(kind, f"{_PREFIX}{name}", text, "model", *labels)

    def _gauge(self, name: str, text: str) -> Numbers:
        return self.registry.numbers("gauge", f"{_PREFIX}{name}", text, "engine")

    def _times(self, name: str, text: str) -> Family[Histogram]:
        return self.registry.histograms(f"{_PREFIX}{name}", text, _SECONDS, "engine")

    def attempt(self, endpoint: Endpoint, *, resumed: bool, fallback: bool) -> None:
        name = endpoint.upstream.name
        self._attempts.at(name).value += 1
        if resumed:
            self._resumed.at(name).value += 1
        if fallback:
            self._fallbacks.at(name).value += 1

    def failed(self, endpoint: Endpoint, kind: str) -> None:
        self._failures.at(endpoint.upstream.name, kind).value += 1

    def moved(self, endpoint: Endpoint) -> None:
        self._moved.at(endpoint.upstream.name).value += 1

    def handed(self, endpoint: Endpoint, result: str) -> None:
        self._handed.at(endpoint.upstream.name, result).value += 1

    def pool_told(self, pool: str, age: float) -> None:
        """Set the seconds since a pool's controller was heard."""
        self._pool_age.at(pool).value = age

    def hedged(self, endpoint: Endpoint, result: str) -> None:
        self._hedges.at(endpoint.upstream.name, result).value += 1

    def cascaded(self, model: str, answered_by: str) -> None:
        """Count a request of a cascade; ``answered_by``: small, escalated or large."""
        self._cascaded.at(model, answered_by).value += 1

    def cascade_wasted(self, model: str, tokens: int) -> None:
        self._wasted.at(model).value += tokens

    def cascade_drifts(self, model: str, distance: float) -> None:
        self._drift.at(model).value = distance

    def cascade_early(self, model: str, result: str) -> None:
        self._early.at(model, result).value += 1

    def cascade_audited(self, model: str, loss: float, is_broken: bool) -> None:
        """Count a request that both models were asked; ``loss``: of the latest ones."""
        self._audited.at(model).value += 1
        self._audited_loss.at(model).value = loss
        self._alarm.at(model).value = float(is_broken)

    def cascade_saved(self, model: str, amount: float) -> None:
        """Add what an answer of the small model has saved; negative: it was paid for nothing."""
        self._saved.at(model).value += amount

    def first_token(self, endpoint: Endpoint, seconds: float) -> None:
        self._first.at(endpoint.upstream.name).observe(seconds)

    def ended(self, engine: str, result: str, seconds: float) -> None:
        """Count the end of a request; ``engine``: its name, "" if it was sent to none."""
        self._requests.at(engine, result).value += 1
        self._seconds.at(engine).observe(seconds)

    def cascade(self, model: str) -> dict[str, Any]:
        """Return what was counted of a cascade, for people."""
        by = {who: int(self._cascaded.value(model, who)) for who in ("small", "escalated", "large")}
        audited = int(self._audited.value(model))
        return {
            "answered": by,
            "handed_off": 1.0 - by["small"] / sum(by.values()) if any(by.values()) else None,
            "saved": self._saved.value(model),
            "wasted_tokens": int(self._wasted.value(model)),
            "audited": audited,
            "audited_loss": self._audited_loss.value(model) if audited else None,
            "alarm": self._alarm.value(model) > 0.0,
        }

    def spent(self, named: Mapping[str, float], others: float, by_model: Mapping[str, int]) -> None:
        """Set spending: today's of each key that the configuration names, and of all others; and
        each model's since the gateway began."""
        for name, spent in by_model.items():
            self._model_spend.at(name).value = float(show_amount(spent))
        for name, amount in (*named.items(), ("", others)):
            self._spend.at(name).value = amount

    def render(self, upstreams: Iterable[Upstream], num_waiting: int, now: float) -> str:
        self._waiting.value = num_waiting
        for upstream in upstreams:
            name, pressure = upstream.name, upstream.load.pressure
            self._up.at(name).value = 0.0 if upstream.trouble else 1.0
            breakers = (upstream.breaker, *(each.breaker for each in upstream.standings.values()))
            is_open = any(breaker.state(now) != "closed" for breaker in breakers)
            self._state.at(name).value = float(is_open)
            self._opened.at(name).value = upstream.num_opened
            self._unsolicited.at(name).value = upstream.pool.num_unsolicited
            self._running.at(name).value = len(upstream.running)
            kv = None if pressure is None else pressure.kv
            self._kv.at(name).value = float("nan") if kv is None else kv
            self._pressed.at(name).value = float(upstream.load.pressed)
            self._share.at(name).value = upstream.share(now)
            self._slow.at(name).value = float(upstream.load.pace.slow_since is not None)
            self._firsts.at(name).value = upstream.load.num_first
            self._first_seconds.at(name, "predicted").value = upstream.load.predicted_first
            self._first_seconds.at(name, "actual").value = upstream.load.actual_first
        return self.registry.render()
