"""How one model does at one engine: whether its requests fail there, and whether it has asked for a
pause. Its engine may be well otherwise, as limits and broken weights are of one model."""

from __future__ import annotations

from typing import Final, Literal

from paceline.gateway.refusals import is_of_the_request
from paceline.http.upstream import Headers
from paceline.routing import Breaker
from paceline.statuses import meaning_of

__all__ = ["Outcome", "Standing", "Standings", "outcome_of_refusal"]

# how a request ended: "missing" says that this endpoint of the model is not there, "unknown" says
# nothing about the model
Outcome = Literal["ok", "failed", "missing", "unknown"]

# models of an engine that are remembered: callers may invent names where a pattern serves them
_MOST: Final = 256


class Standing:
    """Of a model at an engine. Seconds of a clock that never goes back are an argument."""

    def __init__(self) -> None:
        self.breaker = Breaker()
        # by path, where the engine has said that the model or the endpoint is not there
        self._missing: dict[str, Breaker] = {}
        self._rests_until = 0.0

    def rest(self, until: float) -> None:
        """It asked to be left alone; a pause that was asked for before is not shortened."""
        self._rests_until = max(self._rests_until, until)

    def rests_for(self, now: float) -> float:
        """Seconds until it may be sent requests again."""
        return max(0.0, self._rests_until - now)

    def begin(self, path: str, now: float) -> None:
        """A request is sent. Each one ends in ``end``."""
        self.breaker.begin(now)
        if path in self._missing:
            self._missing[path].begin(now)

    def end(self, path: str, outcome: Outcome, now: float) -> None:
        if outcome == "missing" and path not in self._missing:
            self._missing[path] = Breaker()
        _end(self.breaker, "unknown" if outcome == "missing" else outcome, now)
        if path in self._missing:
            _end(self._missing[path], "unknown" if outcome == "failed" else outcome, now)

    def trouble(self, path: str, now: float) -> str:
        """Why it takes no requests; empty where it does."""
        if not self.breaker.allows(now):
            return f"failing ({self.breaker.state(now)})"
        if self._rests_until > now:
            return f"asked for a pause, {self.rests_for(now):.1f} s are left"
        missing = self._missing.get(path)
        return "" if missing is None or missing.allows(now) else f"has no {path} for it"

    def troubles(self, now: float) -> str:
        """Of all its endpoints, for people."""
        paths = ("", *self._missing)
        return "; ".join(filter(None, dict.fromkeys(self.trouble(path, now) for path in paths)))

    def reopens_in(self, path: str, now: float) -> float:
        """Seconds until a breaker lets one request through; 0.0 where none is open."""
        missing = self._missing.get(path)
        waits = self.breaker.reopens_in(now)
        return waits if missing is None else max(waits, missing.reopens_in(now))

    def is_well(self, now: float) -> bool:
        """Whether nothing of it need be remembered."""
        return (
            self.breaker.state(now) == "closed" and self._rests_until <= now and not self._missing
        )


def outcome_of_refusal(
    status: int, headers: Headers, *, names_stored: bool, paused: bool
) -> Outcome:
    """What a refusal says of the model.

    Args:
        names_stored: the request names what an engine has stored: where that is not there, the
            model may well be.
        paused: the model has asked for a pause.
    """
    meaning = meaning_of(status)
    if meaning == "model":
        return "unknown" if names_stored else "missing"
    if meaning == "caller" or (paused and meaning == "passing") or is_of_the_request(headers):
        return "unknown"
    return "failed"


def _end(breaker: Breaker, outcome: Outcome, now: float) -> None:
    if outcome == "ok":
        breaker.succeed(now)
    elif outcome == "unknown":
        breaker.abandon()
    else:
        breaker.fail(now)


class Standings(dict[str, Standing]):
    """Of an engine's models, by their names there: those that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        # times that breakers of models have opened which are not remembered any more
        self._opened_before = 0

    def of(self, model: str, now: float) -> Standing:
        found = self.get(model)
        if found is None:
            if len(self) >= _MOST:
                self._forget(now)
            found = self[model] = Standing()
        return found

    @property
    def num_opened(self) -> int:
        """Times that a breaker of any of them has opened."""
        return self._opened_before + sum(each.breaker.num_opened for each in self.values())

    def _forget(self, now: float) -> None:
        """Models that are well, or else the one that was asked for first."""
        well = [model for model, each in self.items() if each.is_well(now)]
        for model in well or [next(iter(self))]:
            self._opened_before += self.pop(model).breaker.num_opened
