"""Time that fetches from one place take, learned from fetches."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link"]

# fetching must be cheaper than computing by this factor, as predictions are not exact
_MARGIN = 1.25
# weight of the newest fetch
_NEW = 0.5
# share of the way back to the first guess that a refused fetch moves, so that a place which was
# slow once is tried again
_FORGIVEN = 0.05


@dataclass(slots=True)
class Link:
    """Latency and rate of one place. The defaults are first guesses."""

    latency: float = 0.02
    bytes_per_s: float = 1e8

    def seconds(self, num_bytes: int) -> float:
        """Return the predicted time of a fetch."""
        return self.latency + num_bytes / self.bytes_per_s

    def is_worth(self, num_bytes: int, computing: float) -> bool:
        """Return whether to fetch what would take ``computing`` seconds otherwise."""
        if self.seconds(num_bytes) * _MARGIN < computing:
            return True
        guess = Link()
        self.latency += (guess.latency - self.latency) * _FORGIVEN
        self.bytes_per_s += (guess.bytes_per_s - self.bytes_per_s) * _FORGIVEN
        return False

    def observe(self, num_bytes: int, first: float, seconds: float) -> None:
        """Learn from a fetch whose first piece came after ``first`` seconds, and all after
        ``seconds``; from one that brought nothing, ``first`` is the time it took."""
        self.latency += (first - self.latency) * _NEW
        if num_bytes and seconds > 0.0:
            self.bytes_per_s += (num_bytes / seconds - self.bytes_per_s) * _NEW
