"""Hedging: when to ask a second engine because the first token is late.

For the slowest few requests a second attempt costs little and saves much (Dean and Barroso, "The
Tail at Scale"), as long as there is capacity: in a full pool, hedges make everything later. So only
a small share of the requests is hedged, below a share of the pool's capacity, and after a delay
that is late for that engine at that load. Pure: times are arguments, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.routing.engine_load import STALE_SECONDS, Demand, EngineLoad, EngineView

__all__ = ["HedgeBudget", "hedge_delay", "is_worth_it", "saturation"]

# prompt tokens to compute above which a second prefill costs more than it gains
_MAX_PREFILL: Final = 4096.0
# hedges that may be saved up
_BURST: Final = 5.0


class HedgeBudget:
    """Budget of hedges as a share of the requests, in addition to the budget of all retries.

    Args:
        share: hedges per request; 0: none.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved = 0.0

    def deposit(self) -> None:
        """Note that a request has arrived."""
        self._saved = min(_BURST, self._saved + self._share)

    @property
    def left(self) -> float:
        """Hedges that may be sent."""
        return self._saved

    @property
    def has_one(self) -> bool:
        return self._saved >= 1.0

    def take(self) -> None:
        self._saved -= 1.0


def hedge_delay(load: EngineLoad, view: EngineView, least: float) -> float | None:
    """Return the seconds after which a first token is late: later than 19 of 20 of this engine's.
    None: too few are known."""
    factor = load.latency.late_factor()
    return None if factor is None else max(least, factor * view.ttft)


def saturation(load: EngineLoad, places: float, now: float) -> float | None:
    """How full an engine is, from 0 to 1; None: it does not report that, which does not mean empty.

    Args:
        places: requests that it may run at once; infinite if unknown.
    """
    found = []
    pressure = load.pressure
    if pressure is not None and now - pressure.at < STALE_SECONDS:
        if pressure.kv is not None:
            found.append(pressure.kv)
        if pressure.waiting:
            found.append(1.0)
    if places != float("inf"):
        found.append(len(load.running) / places if places else 1.0)
    return min(1.0, max(found)) if found else None


def is_worth_it(
    demand: Demand,
    waited: float,
    second: EngineView,
    saturations: Sequence[float | None],
    below: float,
) -> bool:
    """Whether to ask a second engine.

    Args:
        waited: seconds that the first engine has had.
        second: the engine that would be asked.
        saturations: of every engine that could serve the request, beginning with the second one.
        below: share of their capacity.
    """
    if not saturations or saturations[0] is None or saturations[0] >= below:
        return False
    known = [value for value in saturations if value is not None]
    return (
        sum(known) / len(known) < below
        and not second.pressed
        and not second.wait
        and demand.prompt_tokens - second.cached_tokens <= _MAX_PREFILL
        # the first is late already, and the second is expected to take no longer than that
        and second.ttft <= waited
    )
