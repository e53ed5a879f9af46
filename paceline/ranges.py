"""Allowed ranges of settings: declared in annotations, checked in one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, get_type_hints

__all__ = ["ANY", "Range", "outside", "ranges_of"]

ANY: Final = float("inf")


class Range(NamedTuple):
    """Numbers from ``least`` to ``most``; None is allowed as well."""

    least: float
    most: float = ANY
    # whether ``least`` and ``most`` themselves are excluded
    above: bool = False
    below: bool = False
    # requirement to print for numbers below ``least`` instead of the range
    too_low: str = ""

    def __contains__(self, value: object) -> bool:
        if value is None:
            return True
        assert isinstance(value, int | float)
        low = value > self.least if self.above else value >= self.least
        return low and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        if self.most < ANY:
            return f"in {'[('[self.above]}{self.least}, {self.most}{'])'[self.below]}"
        return f"{'above' if self.above else 'at least'} {self.least}"


def ranges_of(kind: type) -> dict[str, Range]:
    """Return, by attribute, the ranges in a class's annotations: ``Annotated[int, Range(1)]``."""
    return {
        name: allowed
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for allowed in getattr(hint, "__metadata__", ())
        if isinstance(allowed, Range)
    }


def outside(values: object, ranges: Mapping[str, Range]) -> Iterator[tuple[str, str]]:
    """Yield (attribute of ``values``, message) for each value outside its range."""
    for name, allowed in ranges.items():
        value = getattr(values, name)
        if value not in allowed:
            wanted = allowed.too_low if allowed.too_low and value < allowed.most else allowed
            yield name, f"{name} must be {wanted}, got {value}"
