"""Metric families that cost almost nothing to update and little to render.

prometheus_client's own take several milliseconds per scrape; here the names and labels of every
line are written once, when the series appears, and rendering only appends numbers. Not thread-safe:
one thread updates and renders.

This module does not know the meaning of its metrics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from paceline.wire import fast_paths

__all__ = [
    "Description",
    "Family",
    "Histogram",
    "Number",
    "Numbers",
    "Registry",
    "Sample",
    "merged",
]

Kind = Literal["counter", "gauge", "histogram", "summary"]

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Sample(NamedTuple):
    """A line of the exposition. ``labels`` is shared between calls: do not change it."""

    name: str
    labels: Mapping[str, str]
    value: float


class Description(NamedTuple):
    """A family's description for documents."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]


class Number:
    """One series of a counter or gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def values(self) -> list[float]:
        # as one may have been set to a whole number, or to a member of an enum
        return [float(self.value)]


class Histogram:
    """Counts per bucket; an observation costs one bisection."""

    __slots__ = ("_buckets", "_counts", "_sum")

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        return self._sum

    def cumulative(self) -> list[int]:
        """Return the observations up to each bound; the last entry is all of them."""
        return list(accumulate(self._counts))

    def values(self) -> list[float]:
        """Return the numbers of its lines: the buckets', the count, the sum."""
        counts = self.cumulative()
        return [*(counts if self._buckets else ()), counts[-1], float(self._sum)]


_S = TypeVar("_S", Number, Histogram)


class Family(Generic[_S]):
    """One name of the exposition with all its series.

    Args:
        name: as in the TYPE line: a counter's name ends in _total.
        text: description, one line.
        make: makes a series.
        lines: of each series, the end of the name and further labels.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        text: str,
        labels: Sequence[str],
        constant: Mapping[str, str],
        make: Callable[[], _S],
        lines: Sequence[tuple[str, Mapping[str, str]]],
    ) -> None:
        self.name, self.kind, self.text = name, kind, text
        self.labels = tuple(sorted((*labels, *constant)))
        self._names, self._constant = tuple(labels), dict(constant)
        self._make: Callable[[], _S] = make
        self._ends = [(end, dict(more)) for end, more in lines]
        self._series: dict[tuple[str, ...], _S] = {}
        # with each series, of each of its lines: all before the number, name, labels
        self._lines: list[tuple[_S, list[tuple[str, str, dict[str, str]]]]] = []

    def at(self, *values: str) -> _S:
        """Return the series with these label values, made on first use."""
        try:
            return self._series[values]
        except KeyError:
            series = self._series[values] = self._make()
            own = dict(zip(self._names, values, strict=True)) | self._constant
            lines = []
            for end, more in self._ends:
                name, labels = self.name + end, own | more
                lines.append((f"{name}{_braces(labels)} ", name, labels))
            self._lines.append((series, lines))
        return series

    def forget(self) -> None:
        """Drop every series, of a family whose labels change."""
        self._series.clear()
        self._lines.clear()

    def head(self) -> str:
        """Return the lines HELP and TYPE."""
        text = self.text.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {self.name} {text}\n# TYPE {self.name} {self.kind}\n"

    def render(self) -> str:
        """Return its lines, HELP and TYPE first."""
        parts = [self.head()]
        for series, lines in self._lines:
            for (line, _, _), value in zip(lines, series.values(), strict=True):
                parts.append(f"{line}{_number(value)}\n")
        return "".join(parts)

    def samples(self) -> Iterator[Sample]:
        """Yield its lines as values."""
        for series, lines in self._lines:
            for (_, name, labels), value in zip(lines, series.values(), strict=True):
                yield Sample(name, labels, float(value))


class Numbers(Family[Number]):
    """A family of counters or gauges."""

    def value(self, *values: str) -> float:
        """Return the value of the series with these label values; 0.0 if it does not exist, and
        this does not make it."""
        number = self._series.get(values)
        return 0.0 if number is None else number.value

    def clear(self) -> None:
        """Set every series to 0."""
        for number in self._series.values():
            number.value = 0.0

    def replace(self, values: Mapping[str, float]) -> None:
        """Set the series of a family with one label; those not named become 0."""
        self.clear()
        for label, value in values.items():
            self.at(label).value = value


_F = TypeVar("_F", bound=Family[Any])


class Registry:
    """All families of one server, in the order in which they were made.

    Args:
        constant: labels of every series, unless its family has others.
    """

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._constant = dict(constant)
        self._families: dict[str, Family[Any]] = {}
        self._collected = CollectorRegistry()
        self._has_collected = False

    def describe(self) -> Iterator[Description]:
        """Yield the description of every family."""
        for family in self._families.values():
            yield Description(family.name, family.kind, family.text, family.labels)
        for metric in self._collected.collect():
            total = "_total" if metric.type == "counter" else ""
            labels = {label for sample in metric.samples for label in sample.labels}
            yield Description(
                metric.name + total, metric.type, metric.documentation, tuple(sorted(labels))
            )

    def register(self, collector: Collector) -> None:
        """Add families that prometheus_client renders, which takes it ten times as long: only for a
        few whose numbers are kept elsewhere."""
        self._collected.register(collector)
        self._has_collected = True

    def numbers(
        self,
        kind: Literal["counter", "gauge"],
        name: str,
        text: str,
        *labels: str,
        constant: Mapping[str, str] | None = None,
    ) -> Numbers:
        """Make a family with labels. A counter's name is given without its ``_total``."""
        full = f"{name}_total" if kind == "counter" else name
        constant = self._constant if constant is None else constant
        return self._add(Numbers(kind, full, text, labels, constant, Number, [("", {})]))

    def number(self, kind: Literal["counter", "gauge"], name: str, text: str) -> Number:
        """Make a family of one series."""
        return self.numbers(kind, name, text).at()

    def histograms(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        *labels: str,
        constant: Mapping[str, str] | None = None,
    ) -> Family[Histogram]:
        """Make a family with labels; a summary of count and sum when there are no buckets."""
        constant = self._constant if constant is None else constant
        bounds = [*map(str, buckets), "+Inf"] if buckets else []
        lines: list[tuple[str, Mapping[str, str]]] = [("_bucket", {"le": le}) for le in bounds]
        lines += [("_count", {}), ("_sum", {})]
        kind: Kind = "histogram" if buckets else "summary"
        make = partial(Histogram, buckets)
        return self._add(Family(kind, name, text, labels, constant, make, lines))

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """Make a family of one series."""
        return self.histograms(name, text, buckets).at()

    def render(self) -> str:
        """Return the text exposition format, version 0.0.4."""
        families = self._families.values()
        if fast_paths.are_on():
            text = "".join([family.render() for family in families])
        else:
            text = "".join(map(_rendered, families))
        return text + generate_latest(self._collected).decode() if self._has_collected else text

    def samples(self) -> Iterator[Sample]:
        """Yield all lines as values, except those of prometheus_client's families, for computations
        in this process without parsing text."""
        for family in self._families.values():
            yield from family.samples()

    def _add(self, family: _F) -> _F:
        assert family.name not in self._families, f"two families are called {family.name}"
        self._families[family.name] = family
        return family


def merged(*texts: str) -> str:
    """Return one exposition of several: the series of a family stand together, under the head of
    the first text that has it."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for family in text.split("# HELP ")[1:]:
            # name and text, type, series
            head, kind, series = [*family.split("\n", 2), ""][:3]
            name = head.split(" ", 1)[0]
            families.setdefault(name, [f"# HELP {head}\n{kind}\n"]).append(series)
    return "".join(chain.from_iterable(families.values()))


def _rendered(family: Family[Any]) -> str:
    """Render a family from its samples, without lines that were written before."""
    lines = [family.head()]
    for sample in family.samples():
        name = sample.name.removeprefix(family.name)
        number = f"{sample.value:.0f}" if name in ("_bucket", "_count") else _number(sample.value)
        lines.append(f"{sample.name}{_braces(sample.labels)} {number}\n")
    return "".join(lines)


def _braces(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = [f'{name}="{labels[name].translate(_ESCAPES)}"' for name in sorted(labels)]
    return "{" + ",".join(pairs) + "}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
