"""How many guesses were verified, and how many were right, over all requests."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Counts from the start on."""

    # rows with guesses
    num_rows: int = 0
    # by source
    verified: dict[str, int] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)
    # right guesses by their place in the row
    right_by_place: list[int] = field(default_factory=list)

    def note(self, source: str, num_guesses: int, num_right: int) -> None:
        """A row with so many guesses has come back, of which the first ``num_right`` were right."""
        self.num_rows += 1
        self.verified[source] = self.verified.get(source, 0) + num_guesses
        self.right[source] = self.right.get(source, 0) + num_right
        places = self.right_by_place
        places += [0] * (num_guesses - len(places))
        for place in range(num_right):
            places[place] += 1
