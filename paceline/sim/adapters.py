"""Adapters of one simulated engine: the engine's own store, whose loads take virtual time.

::

    Replica --hold--> AdapterStore --submit--> _Loads (one after another, as on the store's thread)
            <-ready--              <--Future-- done once ``now`` has reached the end of a load

A step that runs adapters takes longer by their bytes and by the products of their rows, the two
features that the scheduler learns (``core.predict.step_time``).

This module does not know when steps run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from paceline.core.outputs import ScheduledRow
from paceline.core.request import AdapterUse
from paceline.engine.adapters.interface import AdapterLimits, OpenedAdapter
from paceline.engine.adapters.store import AdapterStore
from paceline.errors import ConfigError

__all__ = ["AdapterSettings", "SimulatedAdapters"]


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Adapters of one engine, all of one size. The speeds are those measured on two cores."""

    # of one adapter, and of those in memory
    num_bytes: int = 10 << 20
    max_bytes: int = 1 << 62
    # to load a byte, and to read it in a step, seconds
    load_byte: float = 5e-9
    read_byte: float = 5e-11
    # of a row with an adapter, for each byte of the adapter
    row_byte: float = 2e-12

    def __post_init__(self) -> None:
        if not 0 < self.num_bytes <= self.max_bytes:
            raise ConfigError(
                f"an adapter of {self.num_bytes} bytes must fit into the {self.max_bytes} for all"
            )
        if min(self.load_byte, self.read_byte, self.row_byte) < 0:
            raise ConfigError(f"adapters take no less than 0 s a byte, got {self}")


class _Loads:
    """The thread and the backend of a store, on a virtual clock."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._settings = settings
        self._now = self._free = 0.0
        # time of its end, and what it gives
        self._under_way: deque[tuple[float, Future[Any], Any]] = deque()

    @property
    def next_at(self) -> float:
        """Time at which the next one ends; infinity: none is under way."""
        return self._under_way[0][0] if self._under_way else math.inf

    def clock(self) -> float:
        return self._free

    def advance(self, now: float) -> None:
        self._now = now
        while self._under_way and self._under_way[0][0] <= now:
            _, future, result = self._under_way.popleft()
            future.set_result(result)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        self._free = max(self._free, self._now)
        future: Future[Any] = Future()
        result = work(*args)
        self._under_way.append((self._free, future, result))
        return future

    def shutdown(self, *, cancel_futures: bool) -> None:
        """Do nothing: there is no thread."""

    def open_adapter(
        self, path: str, max_rank: int | None, dtype: str, pause: Callable[[], None]
    ) -> OpenedAdapter:
        return _Opened(path, self._settings.num_bytes)

    def load_adapter(
        self, slot: int, opened: OpenedAdapter, pause: Callable[[], None]
    ) -> tuple[str, int]:
        self._free += opened.num_bytes * self._settings.load_byte
        assert isinstance(opened, _Opened)
        return opened.name, opened.num_bytes

    def drop_adapter(self, slot: int) -> None:
        """Do nothing: there is no memory."""


@dataclass(frozen=True, slots=True)
class _Opened:
    # also its digest
    name: str
    num_bytes: int
    max_rank: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_products(self) -> int:
        # of two bytes each
        return self.num_bytes // 2


class SimulatedAdapters:
    """Adapters of one replica, known once a request names them."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._settings, self._loads = settings, _Loads(settings)
        limits = AdapterLimits(settings.max_bytes)
        self._store = AdapterStore(self._loads, limits, thread=self._loads, clock=self._loads.clock)
        self._known: dict[str, str] = {}
        # requests that wait, the oldest first, and since when
        self._held: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._held)

    @property
    def next_at(self) -> float:
        """Time of the next event while requests wait."""
        return self._loads.next_at if self._held else math.inf

    def hold(self, request_id: str, name: str, now: float, due: float) -> AdapterUse | None:
        """Return a new request's adapter; None: the request waits until ``ready`` returns it."""
        if name not in self._known:
            key = self._known[name] = f"{name}#{len(self._known)}"
            # one with a digest is loaded when a request names it
            self._store.register(key, name, digest=name)
            self._poll(now)
        self._store.lease(request_id, self._known[name], 1.0, due)
        self._poll(now)
        use = self._store.use_of(request_id)
        if use is None:
            self._held[request_id] = now
        return use

    def wait(self, name: str) -> float:
        """Return the predicted seconds until a request that comes now has its adapter."""
        return self._store.wait(self._known.get(name, ""))

    def ready(self, now: float, live: Collection[str]) -> list[tuple[str, AdapterUse]]:
        """Return requests whose adapter has come, and end the leases of all that neither wait nor
        are ``live``."""
        self._store.release_except(live | self._held.keys())
        self._poll(now)
        found = [(each, use) for each in self._held if (use := self._store.use_of(each))]
        for request_id, _ in found:
            del self._held[request_id]
        return found

    def seconds(self, rows: Collection[ScheduledRow], uses: dict[str, AdapterUse]) -> float:
        """Return the seconds that a step takes longer for the adapters of its rows."""
        own = [(use, row.num_tokens) for row in rows if (use := uses.get(row.request_id))]
        tokens, distinct = sum(count for _, count in own), len({use.slot for use, _ in own})
        each = self._settings
        return each.num_bytes * (distinct * each.read_byte + tokens * each.row_byte)

    @property
    def num_evicted(self) -> int:
        return self._store.books.num_evicted

    def _poll(self, now: float) -> None:
        self._loads.advance(now)
        self._store.poll(now)
        self._loads.advance(now)
        self._store.take_news()
