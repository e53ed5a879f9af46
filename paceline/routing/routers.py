"""Routers, which choose an engine for a request: one small class each.

For each engine a router sees the tokens of its unfinished requests: their prompts, and per request
the mean output length so far, as output lengths are not known in advance. Of the request it sees
the prefix, as identities of the prompt's leading pieces.

This module knows neither time nor schedulers nor the kind of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.errors import ConfigError
from paceline.routing.predicted import PredictedRouter
from paceline.routing.prefixes import PrefixIndex, hash_chain

__all__ = ["ROUTERS", "LeastOutstanding", "PrefixAffinity", "RoundRobin", "Router", "make_router"]


class Router(Protocol):
    """Chooses an engine for each request, in order of arrival."""

    def choose(self, prefix: Sequence[int], outstanding: Sequence[float]) -> int:
        """Return an index into ``outstanding``, the tokens outstanding at each engine.

        Args:
            prefix: pieces of the prompt in order; equal pieces have equal numbers.
        """
        ...


class RoundRobin:
    """Engines in turn. Wins: no state. Loses: long requests pile up at one engine."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prefix: Sequence[int], outstanding: Sequence[float]) -> int:
        index = self._next % len(outstanding)
        self._next = index + 1
        return index


class LeastOutstanding:
    """The engine with the fewest tokens outstanding; the first among equals."""

    def choose(self, prefix: Sequence[int], outstanding: Sequence[float]) -> int:
        return min(range(len(outstanding)), key=outstanding.__getitem__)


class PrefixAffinity:
    """The engine that holds the longest known prefix, unless it is overloaded.

    Cache-aware routing with a load guard, as in SGLang's router: if the loads differ by more than
    ``spread`` tokens and by the factor ``ratio``, the least loaded engine wins; otherwise the one
    that saw the longest leading run of the prompt's pieces. Without a match the request, and its
    prefix, go to the least loaded engine.

    Args:
        memory: prefix pieces remembered per engine; the least recently used are forgotten first.
    """

    def __init__(
        self, *, spread: float = 20_000.0, ratio: float = 1.5, memory: int = 100_000
    ) -> None:
        self._spread = spread
        self._ratio = ratio
        self._memory = memory
        self._seen: list[PrefixIndex] = []

    def choose(self, prefix: Sequence[int], outstanding: Sequence[float]) -> int:
        while len(self._seen) < len(outstanding):
            self._seen.append(PrefixIndex(self._memory))
        least = min(range(len(outstanding)), key=outstanding.__getitem__)
        chain = hash_chain(prefix)
        index = least
        most, fewest = max(outstanding), outstanding[least]
        if chain and (most - fewest <= self._spread or most <= self._ratio * fewest):
            matches = [seen.matched(chain) for seen in self._seen[: len(outstanding)]]
            longest = max(matches)
            if longest:
                index = min(
                    (i for i, match in enumerate(matches) if match == longest),
                    key=outstanding.__getitem__,
                )
        self._seen[index].add(chain)
        return index


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-outstanding": LeastOutstanding,
    "prefix-affinity": PrefixAffinity,
    "predicted": PredictedRouter,
}


def make_router(name: str) -> Router:
    """Make a router by name. Raises ConfigError, listing the known names, for an unknown one."""
    if name not in ROUTERS:
        raise ConfigError(f"unknown router {name!r}; known: {', '.join(sorted(ROUTERS))}")
    return ROUTERS[name]()
