"""A gateway's activity between two readings, and the state of its engines: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.server.observability.snapshot.scrape import Growth, Quantiles, Scrape, ratio

__all__ = ["EngineRow", "GatewayFrame", "KeyRow", "make_gateway_frame"]

_NAME: Final = "paceline:gateway_"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine. A value that it does not report is None, which is not 0."""

    name: str
    kind: str
    url: str
    models: tuple[str, ...]
    # one word (docs/operate/gateway.md); reason why it gets no requests, "": it gets some
    state: str
    trouble: str
    breaker: str
    draining: bool
    slow: bool
    # share that it gets of the requests that it would get in full health
    share: float
    # requests in flight there from this gateway
    requests: int
    # requests there from all clients, as last reported
    running: int | None
    waiting: int | None
    kv: float | None
    memory_pressure: bool
    # seconds since that report
    seconds_ago: float | None
    # requests sent there per second, and their share of all sent in the interval
    sent_per_s: float
    sent_share: float | None
    # mean seconds to first tokens that arrived in the interval: predicted when their requests were
    # sent, and measured
    predicted_first: float | None
    actual_first: float | None
    # in the interval: attempts refused or lost, by kind, and streams resumed there
    failures: Mapping[str, int]
    resumed: int


@dataclass(frozen=True, slots=True)
class KeyRow:
    """Spending of one key: of its budget, or today where it has none."""

    name: str
    spent: float
    # as in the configuration; None: no budget
    budget: str | None
    # spent share of the budget
    share: float | None
    currency: str
    # spending per hour at the rate of the interval
    per_hour: float


@dataclass(frozen=True, slots=True)
class GatewayFrame:
    """State of a gateway. Rates are per second, over the interval between the readings."""

    version: str
    # seconds between the readings
    interval: float
    draining: bool
    in_flight: int
    waiting: int
    retry_budget: float
    # requests that ended in the interval, by result
    ended_per_s: float
    results: Mapping[str, int]
    # in the interval: hedges by result, streams resumed on another engine, and requests sent to a
    # later tier
    hedges: Mapping[str, int]
    resumed: int
    fallbacks: int
    # requests of models with a cascade in the interval, by who answered; tokens of small models
    # that no caller got in it; and spending saved since the gateway began
    cascade: Mapping[str, int]
    cascade_wasted: int
    cascade_saved: float
    # audited requests of a cascade lose more than its bound
    cascade_alarm: bool
    # measured from a request's arrival at the gateway
    ttft: Quantiles
    seconds: Quantiles
    engines: tuple[EngineRow, ...]
    # keys by spending, highest first; empty where nothing has a price
    keys: tuple[KeyRow, ...]


def make_gateway_frame(
    before: tuple[Scrape, Mapping[str, Any]], after: tuple[Scrape, Mapping[str, Any]]
) -> GatewayFrame:
    """Make a frame of two readings of metrics and status, ``after`` being later. Counters that fell
    (the gateway was restarted) count from zero."""
    (then, status_then), (now, status) = before, after
    # spending survives a restart, so it is compared separately
    grown = Growth.since(then, now, f"{_NAME}attempts_total")
    seconds = grown.seconds

    def grew_by(name: str, label: str) -> dict[str, int]:
        return {key: int(count) for key, count in grown.by(_NAME + name, label).items()}

    results = grew_by("requests_total", "result")
    return GatewayFrame(
        version=str(status.get("version", "")),
        interval=seconds,
        draining=bool(status.get("draining")),
        in_flight=int(status.get("in_flight", 0)),
        waiting=int(status.get("waiting", 0)),
        retry_budget=float(status.get("retry_budget", 0.0)),
        ended_per_s=sum(results.values()) / seconds,
        results=results,
        hedges=grew_by("hedges_total", "result"),
        resumed=int(grown.total(f"{_NAME}resumed_total")),
        fallbacks=int(grown.total(f"{_NAME}fallbacks_total")),
        cascade=grew_by("cascade_requests_total", "answered_by"),
        cascade_wasted=int(grown.total(f"{_NAME}cascade_wasted_tokens_total")),
        cascade_saved=now.total(f"{_NAME}cascade_saved"),
        cascade_alarm=now.total(f"{_NAME}cascade_alarm") > 0.0,
        ttft=grown.quantiles(f"{_NAME}time_to_first_token_seconds"),
        seconds=grown.quantiles(f"{_NAME}request_seconds"),
        engines=tuple(_engine(name, told, grown) for name, told in status["engines"].items()),
        keys=_keys(status_then.get("spend", {}), status.get("spend", {}), seconds),
    )


def _engine(name: str, told: Mapping[str, Any], grown: Growth) -> EngineRow:
    def grew(metric: str, **labels: str) -> float:
        count = grown.total(_NAME + metric, engine=name, **labels)
        # the counters of a replaced engine start at zero
        return count if count >= 0 else grown.after.total(_NAME + metric, engine=name, **labels)

    sent = grew("attempts_total")
    all_sent = grown.total(f"{_NAME}attempts_total")
    firsts = grew("first_tokens_total")
    failures = {
        kind: int(grew("attempt_failures_total", kind=kind)) for kind in ("refused", "lost")
    }
    pressure = told.get("pressure") or {}
    return EngineRow(
        name=name,
        kind=str(told.get("kind", "")),
        url=str(told.get("url", "")),
        models=tuple(told.get("models") or ()),
        state=str(told.get("state", "")),
        trouble=str(told.get("trouble") or ""),
        breaker=str(told.get("breaker", "")),
        draining=bool(told.get("draining")),
        slow=bool(told.get("slow")),
        share=float(told.get("share", 1.0)),
        requests=int(told.get("requests", 0)),
        running=_whole(pressure.get("running")),
        waiting=_whole(pressure.get("waiting")),
        kv=pressure.get("kv"),
        memory_pressure=bool(told.get("memory_pressure")),
        seconds_ago=pressure.get("seconds_ago"),
        sent_per_s=sent / grown.seconds,
        sent_share=ratio(sent, all_sent),
        predicted_first=ratio(grew("first_token_seconds_total", kind="predicted"), firsts),
        actual_first=ratio(grew("first_token_seconds_total", kind="actual"), firsts),
        failures={kind: count for kind, count in failures.items() if count},
        resumed=int(grew("resumed_total")),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _keys(
    before: Mapping[str, Any], after: Mapping[str, Any], seconds: float
) -> tuple[KeyRow, ...]:
    rows = []
    for name, told in after.items():
        spent = float(told["spent"])
        had = float(before.get(name, told)["spent"])
        budget = told.get("budget")
        most = None if budget is None else float(budget.partition("/")[0])
        # the budget's period may have restarted in the interval
        grew = spent - had if spent >= had else spent
        rows.append(
            KeyRow(
                name=name,
                spent=spent,
                budget=budget,
                share=None if most is None else ratio(spent, most),
                currency=str(told.get("currency", "")),
                per_hour=3600.0 * grew / seconds,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.spent, row.name)))
