"""State of one model at one engine: failures of its requests, and its cooldown. The engine may be
well otherwise, as limits and broken weights concern one model."""

from __future__ import annotations

from typing import Final, Literal

from paceline.gateway.upstreams.refusals import is_of_the_request
from paceline.http.upstream import Headers
from paceline.routing import Breaker
from paceline.statuses import meaning_of

__all__ = ["Outcome", "Standing", "Standings", "outcome_of_refusal"]

# how a request ended; "missing": the model lacks this path, "unknown": nothing is learned about
# the model
Outcome = Literal["ok", "failed", "missing", "unknown"]

# models remembered per engine: callers may invent names that match a pattern
_MOST: Final = 256


class Standing:
    """State of a model at an engine. Times are arguments, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.breaker = Breaker()
        # path -> breaker, where the engine said that model or path does not exist
        self._missing: dict[str, Breaker] = {}
        self._cooldown_until = 0.0

    def cool_down(self, until: float) -> None:
        """Start a cooldown; an earlier one is not shortened."""
        self._cooldown_until = max(self._cooldown_until, until)

    def cooldown_left(self, now: float) -> float:
        """Seconds until the cooldown ends."""
        return max(0.0, self._cooldown_until - now)

    def begin(self, path: str, now: float) -> None:
        """Note that a request is sent. Each one ends in ``end``."""
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
        """Return why it takes no requests; empty if it does."""
        if not self.breaker.allows(now):
            return f"failing ({self.breaker.state(now)})"
        if self._cooldown_until > now:
            return f"requested a cooldown, {self.cooldown_left(now):.1f} s left"
        missing = self._missing.get(path)
        return "" if missing is None or missing.allows(now) else f"does not serve {path}"

    def troubles(self, now: float) -> str:
        """Return the troubles of all its paths, for people."""
        paths = ("", *self._missing)
        return "; ".join(filter(None, dict.fromkeys(self.trouble(path, now) for path in paths)))

    def reopens_in(self, path: str, now: float) -> float:
        """Seconds until an open breaker lets a probe through; 0.0 if none is open."""
        missing = self._missing.get(path)
        waits = self.breaker.reopens_in(now)
        return waits if missing is None else max(waits, missing.reopens_in(now))

    def is_well(self, now: float) -> bool:
        """Whether it may be forgotten."""
        return (
            self.breaker.state(now) == "closed"
            and self._cooldown_until <= now
            and not self._missing
        )


def outcome_of_refusal(
    status: int, headers: Headers, *, names_stored: bool, cooling_down: bool
) -> Outcome:
    """Return what a refusal says about the model.

    Args:
        names_stored: the request names a stored object: if the engine lacks that, it may still have
            the model.
        cooling_down: the model is in a cooldown.
    """
    meaning = meaning_of(status)
    if meaning == "model":
        return "unknown" if names_stored else "missing"
    if meaning == "caller" or (cooling_down and meaning == "passing") or is_of_the_request(headers):
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
    """States of an engine's models, by name at the engine, once they were requested."""

    def __init__(self) -> None:
        super().__init__()
        # openings of breakers that are no longer remembered
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
        """Number of times that its models' breakers have opened."""
        return self._opened_before + sum(each.breaker.num_opened for each in self.values())

    def _forget(self, now: float) -> None:
        """Forget models that are well, or else the one that was requested first."""
        well = [model for model, each in self.items() if each.is_well(now)]
        for model in well or [next(iter(self))]:
            self._opened_before += self.pop(model).breaker.num_opened
