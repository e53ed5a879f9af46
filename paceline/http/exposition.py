"""Metric families that cost almost nothing to update and little to render.

prometheus_client's own take several milliseconds per scrape; here the names and labels of every
line are written once, when the series appears, and rendering only appends numbers. Not thread-safe:
one thread updates and renders.

This module does not know the meaning of its metrics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from paceline.wire import fast_paths

__all__ = [
    "Description",
    "Family",
    "Histogram",
    "Histograms",
    "Number",
    "Numbers",
    "Registry",
    "Sample",
]

Kind = Literal["counter", "gauge", "histogram", "summary"]

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Sample(NamedTuple):
    """A line of the exposition. ``labels`` is shared between calls: do not change it."""

    name: str
    labels: Mapping[str, str]
    value: float


class Family(Protocol):
    """One name of the exposition with all its series."""

    # as in the TYPE line: a counter's name ends in _total
    name: str
    kind: Kind
    # description, one line
    text: str
    # names of all labels, sorted
    labels: tuple[str, ...]

    def render(self) -> str:
        """Return its lines, HELP and TYPE first."""
        ...

    def samples(self) -> Iterator[Sample]:
        """Yield its lines as values."""
        ...


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


class Numbers:
    """A family of counters or gauges."""

    def __init__(
        self, kind: Kind, name: str, text: str, labels: Sequence[str], constant: Mapping[str, str]
    ) -> None:
        self.name, self.kind, self.text = name, kind, text
        self.labels = tuple(sorted((*labels, *constant)))
        self._names, self._constant = tuple(labels), dict(constant)
        self._head = _head(self)
        self._numbers: dict[tuple[str, ...], Number] = {}
        self._lines: list[tuple[str, Number]] = []
        # labels of each line, made when samples are first read
        self._told: list[Mapping[str, str]] = []

    def at(self, *values: str) -> Number:
        """Return the series with these label values, made on first use."""
        number = self._numbers.get(values)
        if number is None:
            number = self._numbers[values] = Number()
            labels = dict(zip(self._names, values, strict=True)) | self._constant
            self._lines.append((f"{self.name}{_braces(labels)} ", number))
        return number

    def value(self, *values: str) -> float:
        """Return the value of the series with these label values; 0.0 if it does not exist, and
        this does not make it."""
        number = self._numbers.get(values)
        return 0.0 if number is None else number.value

    def clear(self) -> None:
        """Set every series to 0."""
        for number in self._numbers.values():
            number.value = 0.0

    def replace(self, values: Mapping[str, float]) -> None:
        """Set the series of a family with one label; those not named become 0."""
        self.clear()
        for label, value in values.items():
            self.at(label).value = value

    def render(self) -> str:
        lines = [f"{line}{_number(number.value)}\n" for line, number in self._lines]
        return self._head + "".join(lines)

    def samples(self) -> Iterator[Sample]:
        for values in [*self._numbers][len(self._told) :]:
            self._told.append(dict(zip(self._names, values, strict=True)) | self._constant)
        for labels, (_, number) in zip(self._told, self._lines, strict=True):
            yield Sample(self.name, labels, float(number.value))


class Histograms:
    """A family of histograms; of summaries without quantiles when there are no buckets."""

    def __init__(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        labels: Sequence[str],
        constant: Mapping[str, str],
    ) -> None:
        self.name, self.text = name, text
        self.kind: Kind = "histogram" if buckets else "summary"
        self.labels = tuple(sorted((*labels, *constant)))
        self._names, self._constant, self._buckets = tuple(labels), dict(constant), buckets
        self._head = _head(self)
        self._histograms: dict[tuple[str, ...], Histogram] = {}
        # per series: the text before each bucket's count, before the count and before the sum
        self._lines: list[tuple[Histogram, list[str], str, str]] = []
        # per series, made when samples are first read: labels of each bucket, then its own
        self._told: list[list[Mapping[str, str]]] = []

    def at(self, *values: str) -> Histogram:
        """Return the series with these label values, made on first use."""
        histogram = self._histograms.get(values)
        if histogram is None:
            histogram = self._histograms[values] = Histogram(self._buckets)
            labels = dict(zip(self._names, values, strict=True)) | self._constant
            bounds = [*map(str, self._buckets), "+Inf"] if self._buckets else []
            buckets = [f"{self.name}_bucket{_braces(labels | {'le': le})} " for le in bounds]
            plain = _braces(labels)
            self._lines.append(
                (histogram, buckets, f"{self.name}_count{plain} ", f"{self.name}_sum{plain} ")
            )
        return histogram

    def render(self) -> str:
        parts = [self._head]
        for histogram, buckets, count, total in self._lines:
            counts = histogram.cumulative()
            parts += [f"{line}{n}\n" for line, n in zip(buckets, counts, strict=False)]
            parts.append(f"{count}{counts[-1]}\n{total}{_number(histogram.sum)}\n")
        return "".join(parts)

    def samples(self) -> Iterator[Sample]:
        bounds = [*map(str, self._buckets), "+Inf"] if self._buckets else []
        for values in [*self._histograms][len(self._told) :]:
            labels = dict(zip(self._names, values, strict=True)) | self._constant
            self._told.append([*(labels | {"le": bound} for bound in bounds), labels])
        for (*buckets, plain), (histogram, *_) in zip(self._told, self._lines, strict=True):
            counts = histogram.cumulative()
            for bucket, count in zip(buckets, counts, strict=False):
                yield Sample(f"{self.name}_bucket", bucket, float(count))
            yield Sample(f"{self.name}_count", plain, float(counts[-1]))
            yield Sample(f"{self.name}_sum", plain, float(histogram.sum))


class Registry:
    """All families of one server, in the order in which they were made.

    Args:
        constant: labels of every series, unless its family has others.
    """

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._constant = dict(constant)
        self._families: dict[str, Family] = {}
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
        family = Numbers(kind, full, text, labels, constant)
        self._add(family)
        return family

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
    ) -> Histograms:
        """Make a family with labels; a summary of count and sum when there are no buckets."""
        constant = self._constant if constant is None else constant
        family = Histograms(name, text, buckets, labels, constant)
        self._add(family)
        return family

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

    def _add(self, family: Family) -> None:
        assert family.name not in self._families, f"two families are called {family.name}"
        self._families[family.name] = family


def _rendered(family: Family) -> str:
    """Render a family from its samples, without lines that were written before."""
    lines = [_head(family)]
    for sample in family.samples():
        name = sample.name.removeprefix(family.name)
        number = f"{sample.value:.0f}" if name in ("_bucket", "_count") else _number(sample.value)
        lines.append(f"{sample.name}{_braces(sample.labels)} {number}\n")
    return "".join(lines)


def _head(family: Family) -> str:
    text = family.text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n"


def _braces(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = [f'{name}="{labels[name].translate(_ESCAPES)}"' for name in sorted(labels)]
    return "{" + ",".join(pairs) + "}"


def _number(value: float) -> str:
    if math.isfinite(value):
        # an int of another kind (an enum) has another repr
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
