"""Figures of a run: latencies, goodput, attainment, waste, cost; collected request by request.

Definitions, as the field uses them:

* TTFT is arrival to first token, TPOT the mean seconds per token after the first, E2E arrival to
  last token, ITL the gap between two tokens of one stream;
* a request is *met* when it finished within all its targets. A refused or unfinished request is
  not met;
* goodput is met requests per second of the time in which requests arrive, attainment met requests
  per request (DistServe, OSDI'24). The time after the last arrival, in which a run only drains, is
  not counted: it would make the same service look worse the shorter the workload;
* requests, tokens and cost per second are of the whole run, first arrival to last token;
* wasted tokens were computed for requests that finished but were not met.

Percentiles are of all values, interpolated between neighbours, never of a sample. That takes 40
bytes per request (a million: 40 MB). Gaps between tokens are too many for that, so they go into a
sketch with a relative error of at most 1 %. This module does not know the source of requests.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.slo import Slo
from paceline.sim.arrival import Arrival, Served

__all__ = [
    "ClassSummary",
    "Distribution",
    "Metrics",
    "Summary",
    "TenantSummary",
    "cost_per_million",
]

_GAMMA = 1.02
_LOG_GAMMA = math.log(_GAMMA)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of ``count`` values in seconds, at least one."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Distribution | None:
        if not len(values):
            return None
        # sorted, since the last digit of the mean depends on the order of addition
        values = np.sort(values)
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(
            len(values),
            float(values.mean()),
            float(p50),
            float(p90),
            float(p99),
            float(values.max()),
        )


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The requests of one SLO class, or of one minute."""

    requests: int
    met: int
    refused: int

    @property
    def attainment(self) -> float:
        """Share of requests within all their targets, 0 to 1."""
        return self.met / self.requests


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """The requests of one tenant. Seconds; None where no request had a first token."""

    requests: int
    met: int
    refused: int
    # tokens of finished requests
    prompt_tokens: int
    output_tokens: int
    ttft_mean: float | None

    @property
    def attainment(self) -> float:
        """Share of requests within all their targets, 0 to 1."""
        return self.met / self.requests


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Times in seconds; None where no request had such a value."""

    name: str
    requests: int
    finished: int
    refused: int
    preemptions: int
    # first arrival to last token
    duration: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    # arrival to the first step that computed a part of the request
    queued: Distribution | None
    # E2E of the quarter of finished requests with the longest outputs, which may pay for the
    # others' low means
    e2e_p99_longest: float | None
    # finished requests, and tokens, per second
    request_rate: float
    token_rate: float
    goodput: float
    attainment: float
    # share of output tokens that belong to requests that missed a target
    wasted_tokens: float
    by_class: Mapping[str, ClassSummary]
    # cost of one million output tokens; None without a price
    cost: float | None = None
    # first to last arrival, the time that goodput is divided by
    arriving: float = 0.0
    # refused requests by reason, the most frequent first
    refusals: Mapping[str, int] = field(default_factory=dict)
    by_tenant: Mapping[str, TenantSummary] = field(default_factory=dict)
    # the requests by the minute in which they arrived, "0" and on; minutes without any are left out
    by_minute: Mapping[str, ClassSummary] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for json.dumps, with attainment per class, tenant and minute."""
        values = asdict(self)
        groups: tuple[tuple[str, Mapping[str, ClassSummary | TenantSummary]], ...] = (
            ("by_class", self.by_class),
            ("by_tenant", self.by_tenant),
            ("by_minute", self.by_minute),
        )
        for key, entries in groups:
            values[key] = {
                name: asdict(entry) | {"attainment": entry.attainment}
                for name, entry in entries.items()
            }
        return values


def cost_per_million(tokens_per_second: float, price_per_hour: float) -> float:
    """Return the price of a million tokens at a steady rate; infinity without tokens."""
    if tokens_per_second <= 0:
        return math.inf
    return price_per_hour / 3600.0 / tokens_per_second * 1e6


class _Gaps:
    """Counts by powers of 1.02: any quantile is within 1 % of the true one, for any number of
    values (DDSketch, VLDB'19, arXiv 1908.10693)."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._sum = 0.0
        self._max = 0.0
        self._count = 0

    def add(self, seconds: float, count: int) -> None:
        # tokens of one step come together: a gap of zero counts as a nanosecond
        self._buckets[math.ceil(math.log(max(seconds, 1e-9)) / _LOG_GAMMA)] += count
        self._sum += seconds * count
        self._count += count
        self._max = max(self._max, seconds)

    def distribution(self) -> Distribution | None:
        if not self._count:
            return None
        p50, p90, p99 = (self._quantile(q) for q in (0.5, 0.9, 0.99))
        return Distribution(self._count, self._sum / self._count, p50, p90, p99, self._max)

    def _quantile(self, q: float) -> float:
        rank = q * (self._count - 1)
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen > rank:
                # the bucket is (gamma^(b-1), gamma^b]: this point is within 1 % of all of it
                return min(self._max, 2.0 * _GAMMA**bucket / (_GAMMA + 1.0))
        return self._max


@dataclass(slots=True)
class _Tenant:
    """Running counts of one tenant."""

    requests: int = 0
    met: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    started: int = 0
    ttft: float = 0.0

    def summary(self) -> TenantSummary:
        mean = self.ttft / self.started if self.started else None
        return TenantSummary(
            self.requests, self.met, self.refused, self.prompt_tokens, self.output_tokens, mean
        )


class Metrics:
    """Collector of requests, one by one, in any order."""

    def __init__(self) -> None:
        self._ttft = array("d")
        self._tpot = array("d")
        self._queued = array("d")
        # E2E of the same requests, index for index
        self._e2e = array("d")
        self._lengths = array("q")
        self._gaps = _Gaps()
        self._slos: dict[tuple[float | None, float | None, float | None], Slo] = {}
        # per class, and per minute of arrival: requests, met, refused
        self._classes: dict[str, list[int]] = {}
        self._minutes: dict[int, list[int]] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._refusals: Counter[str] = Counter()
        self._preemptions = 0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._wasted_tokens = 0
        self._first_arrival, self._last_token = math.inf, -math.inf
        self._last_arrival = -math.inf

    def add(self, served: Served) -> None:
        """Add one finished or refused request."""
        arrival = served.arrival
        counts = self._classes.setdefault(arrival.slo_class, [0, 0, 0])
        minute = self._minutes.setdefault(int(arrival.at // 60.0), [0, 0, 0])
        counts[0] += 1
        minute[0] += 1
        tenant = self._tenants.get(arrival.tenant)
        if tenant is None:
            tenant = self._tenants[arrival.tenant] = _Tenant()
        tenant.requests += 1
        self._first_arrival = min(self._first_arrival, arrival.at)
        self._last_arrival = max(self._last_arrival, arrival.at)
        self._preemptions += served.preemptions
        if served.refused:
            counts[2] += 1
            minute[2] += 1
            tenant.refused += 1
            self._refusals[served.reason or "refused"] += 1
            return
        if served.first_scheduled is not None:
            self._queued.append(served.first_scheduled - arrival.at)
        if served.first_token is None or served.last_token is None:
            return
        self._ttft.append(served.first_token - arrival.at)
        self._e2e.append(served.last_token - arrival.at)
        self._lengths.append(served.output_tokens)
        if served.tpot is not None:
            self._tpot.append(served.tpot)
        self._last_token = max(self._last_token, served.last_token)
        self._prompt_tokens += arrival.prompt_tokens
        self._cached_tokens += served.cached_tokens
        self._output_tokens += served.output_tokens
        tenant.started += 1
        tenant.ttft += served.first_token - arrival.at
        tenant.prompt_tokens += arrival.prompt_tokens
        tenant.output_tokens += served.output_tokens
        missed = self._slo(arrival).violations(
            arrival.at, served.first_token, served.last_token, served.output_tokens
        )
        if missed:
            self._wasted_tokens += served.output_tokens
        else:
            counts[1] += 1
            minute[1] += 1
            tenant.met += 1

    def add_gap(self, seconds: float, count: int = 1) -> None:
        """Add ``count`` gaps of ``seconds`` between tokens of a stream."""
        self._gaps.add(seconds, count)

    def _slo(self, arrival: Arrival) -> Slo:
        targets = (arrival.ttft, arrival.tpot, arrival.deadline)
        slo = self._slos.get(targets)
        if slo is None:
            slo = self._slos[targets] = Slo(ttft=targets[0], tpot=targets[1], deadline=targets[2])
        return slo

    def values(self, metric: str) -> NDArray[np.float64]:
        """Return all seconds of "ttft", "tpot" or "e2e" in order of addition; a copy."""
        arrays = {"ttft": self._ttft, "tpot": self._tpot, "e2e": self._e2e}
        return np.array(arrays[metric], dtype=np.float64)

    def targets(self, metric: str) -> tuple[float, ...]:
        """Return the seconds of every target of "ttft", "tpot" or "e2e" (the deadline) that a
        request had, ascending."""
        found = {
            {"ttft": slo.ttft, "tpot": slo.tpot, "e2e": slo.deadline}[metric]
            for slo in self._slos.values()
        }
        return tuple(sorted(value for value in found if value is not None))

    def summary(self, name: str = "", *, price_per_hour: float | None = None) -> Summary:
        """Return a summary of everything so far.

        Args:
            price_per_hour: price of all replicas together.
        """
        e2e = self.values("e2e")
        finished = len(e2e)
        classes = {key: ClassSummary(*self._classes[key]) for key in sorted(self._classes)}
        requests = sum(entry.requests for entry in classes.values())
        met = sum(entry.met for entry in classes.values())
        duration = max(0.0, self._last_token - self._first_arrival) if finished else 0.0
        per_second = 1.0 / duration if duration > 0 else 0.0
        arriving = max(0.0, self._last_arrival - self._first_arrival)
        # requests that all came at once have no arrival rate
        window = arriving or duration
        token_rate = self._output_tokens * per_second
        return Summary(
            name=name,
            requests=requests,
            finished=finished,
            refused=sum(entry.refused for entry in classes.values()),
            preemptions=self._preemptions,
            duration=duration,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            ttft=Distribution.of(self.values("ttft")),
            tpot=Distribution.of(self.values("tpot")),
            itl=self._gaps.distribution(),
            e2e=Distribution.of(e2e),
            queued=Distribution.of(np.array(self._queued, dtype=np.float64)),
            e2e_p99_longest=self._longest(e2e),
            request_rate=finished * per_second,
            token_rate=token_rate,
            goodput=met / window if window > 0 else 0.0,
            attainment=met / requests if requests else 0.0,
            wasted_tokens=self._wasted_tokens / self._output_tokens if self._output_tokens else 0.0,
            by_class=classes,
            arriving=arriving,
            refusals=dict(self._refusals.most_common()),
            by_tenant={name: self._tenants[name].summary() for name in sorted(self._tenants)},
            by_minute={
                str(minute): ClassSummary(*self._minutes[minute])
                for minute in sorted(self._minutes)
            },
            cost=None if price_per_hour is None else cost_per_million(token_rate, price_per_hour),
        )

    def _longest(self, e2e: NDArray[np.float64]) -> float | None:
        if not len(e2e):
            return None
        lengths = np.array(self._lengths, dtype=np.int64)
        return float(np.percentile(e2e[lengths >= np.percentile(lengths, 75)], 99))
