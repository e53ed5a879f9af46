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

    def observe(self, head: int, first: float, num_bytes: int, seconds: float) -> None:
        """Learn from a fetch whose first piece, of ``head`` bytes, came after ``first`` seconds,
        and all bytes after ``seconds``; from one that brought nothing, ``first`` is the time it
        took."""
        rest = num_bytes - head
        # of less, most has come with the first piece
        if rest >= head > 0 and seconds > first:
            self.bytes_per_s += (rest / (seconds - first) - self.bytes_per_s) * _NEW
        latency = max(0.0, first - head / self.bytes_per_s)
        self.latency += (latency - self.latency) * _NEW
