"""Threshold that yields to load: between two bounds, by the wait at the large engines."""

from __future__ import annotations

from typing import Final

__all__ = ["Easing"]

# share of the full wait at which the threshold begins to move
_BEGINS: Final = 0.25


class Easing:
    """Threshold of one model. It moves from ``strict`` to ``eased`` while the wait grows, and back
    only once the wait has halved, so that it does not flap.

    Args:
        strict: threshold without load.
        eased: threshold at the full wait and beyond; at most ``strict``.
        full_wait: predicted seconds to the large model's first token.
    """

    def __init__(self, strict: float, eased: float, full_wait: float) -> None:
        assert eased <= strict, "a larger loss has a lower threshold"
        self._strict, self._eased, self._full = strict, eased, full_wait
        # how far it has moved, 0 to 1
        self.share = 0.0

    def threshold(self, wait: float) -> float:
        """Take in the wait, and return the threshold."""
        self.share = min(max(self.share, self._share_at(wait)), self._share_at(2.0 * wait))
        if self.share == 0.0 or self._eased == self._strict:
            return self._strict
        if self.share == 1.0:
            # without the rounding of what follows
            return self._eased
        # no score is above 1, so an infinite threshold begins to move there
        top = min(self._strict, max(1.0, self._eased))
        return max(self._eased, top + self.share * (self._eased - top))

    def _share_at(self, wait: float) -> float:
        begins = _BEGINS * self._full
        return min(1.0, max(0.0, (wait - begins) / (self._full - begins)))
