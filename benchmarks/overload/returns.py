"""Clients that come back after ``Retry-After``: are they accepted?

*Ends*: two minutes at 1.5, then 0.7. *Burst*: 0.7 all the time, and BURST requests at once after a
minute. All refused clients come back after ``Retry-After``, at most MOST times; those that come
back once the overload is over are judged, by the first time they do. ``clients`` is the share of
all refused clients that were accepted in the end. *Lasts*: the load stays at 2, and one in ten
refused clients comes back, once, next to newcomers. A request counts as taken if it is neither
refused on arrival nor dropped later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.overload.judging import MINUTE
from benchmarks.overload.serving import EQUAL, PLACES, as_served, chats, play, times
from paceline.sim.arrival import Arrival, Served
from paceline.sim.report.table import text_table

__all__ = ["SITUATIONS", "Outcome", "Returned", "Returns", "figures", "kept", "returns", "table"]

BURST: Final = 500
# times that a client comes back before it gives up
MOST: Final = 10
# seconds and loads; and when the overload is over
SITUATIONS: Final[dict[str, tuple[tuple[tuple[float, float], ...], float]]] = {
    "ends": (((2 * MINUTE, 1.5), (5 * MINUTE, 0.7)), 2 * MINUTE),
    "burst": (((6 * MINUTE, 0.7),), MINUTE),
    "lasts": (((8 * MINUTE, 2.0),), MINUTE),
}
# one in this many refused clients comes back under a lasting overload
_SAMPLE: Final = 10
# seconds before the end of a run from which on requests are not judged, as they may not end in it
_REST: Final = 90.0


class Returned(NamedTuple):
    """One run."""

    situation: str
    server: str
    seed: int


class Outcome(NamedTuple):
    """Results of a run: pairs are numbers of clients or requests, and of those that were taken."""

    refused: int
    # clients that were refused at first
    clients: tuple[int, int]
    # clients' first returns once the overload was over, and all returns
    judged: tuple[int, int]
    all: tuple[int, int]
    # requests that arrived for the first time, in the time in which returns are judged
    newcomers: tuple[int, int]
    # seconds of every ``Retry-After``
    told: list[float]


class Returns:
    """Clients of a run: which requests are returns, and of which client.

    Args:
        sampled: one in this many comes back, and only once; None: all do, at most MOST times.
    """

    def __init__(self, sampled: int | None) -> None:
        self._sampled = sampled
        self._num_refused = 0
        # the client of a return, and which of its returns it is; a client is its first request
        self.clients: dict[int, tuple[Arrival, int]] = {}
        self.arrivals: list[Arrival] = []
        self.outcomes: dict[int, Served] = {}
        self.told: list[float] = []

    def again(self, record: Served, now: float) -> Arrival | None:
        """Return the client's next request if it comes back; called by ``Simulator``."""
        arrival = record.arrival
        client, number = self.clients.get(id(arrival), (arrival, 0))
        if number:
            self.outcomes[id(arrival)] = record
        if record.retry_after is None:
            return None
        self._num_refused += not number
        self.told.append(record.retry_after)
        if number >= (MOST if self._sampled is None else 1):
            return None
        if self._sampled is not None and self._num_refused % self._sampled:
            return None
        back = replace(arrival, at=now + record.retry_after)
        self.clients[id(back)] = client, number + 1
        self.arrivals.append(back)
        return back


def _taken(served: Served | None) -> bool:
    return served is not None and not served.refused


def returns(asked: Returned) -> Outcome:
    """Serve the requests and the returns of refused clients."""
    parts, over = SITUATIONS[asked.situation]
    end = sum(seconds for seconds, _ in parts)
    arrivals = chats(times(parts, asked.seed))
    if asked.situation == "burst":
        arrivals += chats([MINUTE] * BURST)
    clients = Returns(_SAMPLE if asked.situation == "lasts" else None)
    config = as_served(asked.server, max_num_seqs=PLACES)
    run = play(config, EQUAL, arrivals, until=end, again=clients.again)
    first: dict[int, bool] = {}
    at_last: dict[int, bool] = {}
    every = []
    for back in clients.arrivals:
        taken = _taken(clients.outcomes.get(id(back)))
        client, _ = clients.clients[id(back)]
        if client.at < end - _REST:
            at_last[id(client)] = taken or at_last.get(id(client), False)
        if back.at < end - _REST:
            every.append(taken)
            if back.at >= over:
                first.setdefault(id(client), taken)
    newcomers = [
        _taken(served)
        for arrival, served in zip(run.arrivals, run.outcomes, strict=True)
        if over <= arrival.at < end - _REST
    ]
    return Outcome(
        sum(each is not None and each.refused for each in run.outcomes),
        (len(at_last), sum(at_last.values())),
        (len(first), sum(first.values())),
        (len(every), sum(every)),
        (len(newcomers), sum(newcomers)),
        clients.told,
    )


def figures(found: Mapping[Returned, Outcome]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return figures by server and situation, over all seeds. The share of no requests is None."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for server, name in dict.fromkeys((asked.server, asked.situation) for asked in found):
        runs = [
            e for asked, e in found.items() if (asked.server, asked.situation) == (server, name)
        ]
        told = [seconds for run in runs for seconds in run.told]
        results.setdefault(server, {})[name] = {
            "refused": sum(run.refused for run in runs),
            "returns_judged": sum(run.judged[0] for run in runs),
            "taken": _share([run.judged for run in runs]),
            "taken_of_clients": _share([run.clients for run in runs]),
            "taken_of_all_returns": _share([run.all for run in runs]),
            "taken_of_newcomers": _share([run.newcomers for run in runs]),
            "retry_after_median_s": round(median(told), 1) if told else None,
        }
    return results


def _share(counts: list[tuple[int, int]]) -> float | None:
    came = sum(each for each, _ in counts)
    return round(sum(each for _, each in counts) / came, 3) if came else None


def kept(found: Mapping[Returned, Outcome]) -> float | None:
    """Return the least share taken of all servers after overloads that end."""
    shares = [
        entry["taken"]
        for situations in figures(found).values()
        for name, entry in situations.items()
        if name != "lasts" and entry["taken"] is not None
    ]
    return min(shares, default=None)


def table(found: Mapping[Returned, Outcome]) -> str:
    """Return a table for people."""
    rows = [["", "", "refused", "came back", "taken", "clients", "of all returns",
             "newcomers", "Retry-After median s"]]  # fmt: skip
    for server, situations in figures(found).items():
        for name, entry in situations.items():
            rows.append([server, name, *("-" if e is None else str(e) for e in entry.values())])
    return text_table(rows)
