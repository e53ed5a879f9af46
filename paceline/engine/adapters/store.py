"""Adapters of one engine, loaded on a thread of their own next to the step loop.

::

    register ---> opening ---> known <---> loading ---> resident
                     `-----> failed <---------'

``poll`` moves adapters on, and is called between steps. A plan names an adapter by its slot only
once it is resident: a request that has to wait does so in ``process.readiness``.

Where requests use all adapters in memory, the oldest request for another one waits a moment. Then
one of those in memory drains: later requests for it wait behind the older one, so that this one
waits for the requests under way and a load, however many follow.

This module does not know what an adapter's values are.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from paceline.core.request import AdapterUse
from paceline.engine.adapters.interface import AdapterBackend, AdapterLimits, OpenedAdapter
from paceline.engine.adapters.loading import LoadingThread, Slices, yield_to_steps
from paceline.engine.adapters.residency import Residency, State
from paceline.engine.types import AdapterStats, AdapterStatus
from paceline.errors import (
    AdapterRoomError,
    CheckpointError,
    InvalidRequestError,
    PacelineError,
    UnknownModelError,
)

__all__ = ["AdapterStore"]

_log = logging.getLogger(__name__)

# seconds that a request waits for room before another adapter drains for it, at least; and that as
# a multiple of its load
_PATIENCE: Final = 1.0
_LOADS: Final = 2.0
# assumed seconds to load a byte before one was loaded, and the weight of each later load
_SECONDS_PER_BYTE: Final = 8e-9
_FOLLOW: Final = 0.3
# adapters that metrics name
_MOST_NAMES: Final = 50


class _Loaded(NamedTuple):
    digest: str
    num_bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Adapter:
    path: str
    # its file is opened, then its values are read
    opening: Future[OpenedAdapter] | None = None
    loading: Future[_Loaded] | None = None
    opened: OpenedAdapter | None = None
    # digest of its contents at its first load; empty until then
    digest: str = ""
    slot: int = -1
    # how long its last load took
    seconds: float = 0.0
    error: PacelineError | None = None
    # it is loaded before those that requests wait for, and stays
    pinned: bool = False
    # requests that use it or wait for it
    requests: set[str] = field(default_factory=set)
    # those of them that wait until it has drained, without a lease
    behind: list[str] = field(default_factory=list)
    # it was forgotten before the books knew it
    forgotten: bool = False


class _Use(NamedTuple):
    key: str
    scale: float
    # time at which its first token is due
    due: float


class AdapterStore:
    """Registered adapters by key. Used from the engine's thread; ``close`` ends its own.

    Args:
        thread: None: one of its own, at low priority.
        clock: seconds, for the loads alone.
    """

    def __init__(
        self,
        backend: AdapterBackend,
        limits: AdapterLimits,
        *,
        thread: LoadingThread | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._limits, self._clock = backend, limits, clock
        self._books = Residency(limits.max_bytes, limits.max_count)
        self._adapters: dict[str, _Adapter] = {}
        # requests by id, the oldest first
        self._uses: dict[str, _Use] = {}
        # the adapter that its oldest request has found no room for, and since when
        self._blocked: tuple[str, float] | None = None
        self._drains = False
        # learned: seconds to load a byte, and of the wait for room
        self._seconds_per_byte, self._room_seconds = _SECONDS_PER_BYTE, _PATIENCE
        self._is_computing = False
        self._slices = Slices(lambda: self._is_computing)
        # those that the thread is at work on, by key
        self._under_way: dict[str, _Adapter] = {}
        # keys to load without a request that waits for them, in order
        self._wanted: list[str] = []
        self._num_slots = 0
        self._thread = thread or ThreadPoolExecutor(
            1, thread_name_prefix="paceline-adapters", initializer=yield_to_steps
        )
        self._news: list[AdapterStatus] = []
        # called with the keys of the adapters that the thread is about to work on
        self.on_loading: Callable[[Collection[str]], None] | None = None
        # what ``stats`` counts
        self._loads, self._left = Counter[str](), Counter[str]()
        self._load_seconds = self._wait_seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """Return whether ``poll`` is needed soon: something is being loaded, or wanted."""
        return bool(self._wanted or self._under_way)

    @property
    def has_leases(self) -> bool:
        return bool(self._uses)

    @property
    def books(self) -> Residency:
        return self._books

    def register(self, key: str, path: str, digest: str = "", *, pinned: bool = False) -> None:
        """Begin to check and load an adapter; ``take_news`` tells how that went.

        Args:
            digest: the contents that it must have, as an earlier engine loaded it: such an adapter
                is loaded when a request names it, unless it is pinned. Empty: it is loaded at once.
            pinned: it stays in memory until it is forgotten.
        """
        assert key not in self._adapters, f"adapter {key} is registered"
        adapter = self._adapters[key] = _Adapter(path, digest=digest, pinned=pinned)
        self._under_way[key] = adapter
        self._tell_loading()
        adapter.opening = self._thread.submit(self._open, path)

    def forget(self, key: str) -> None:
        """Take no new requests for an adapter; its memory goes with the last request."""
        adapter = self._adapters.get(key)
        if adapter is None:
            return
        if self._books.state(key) is not None:
            if adapter.behind:
                # they keep it, so nothing else will take its place
                self._end_draining()
            if self._books.forget(key):
                self._gone(key)
        elif adapter.requests:
            # its file was not opened yet, or could not be, and requests still ask for it
            adapter.forgotten = True
        else:
            self._gone(key)

    def wait(self, key: str) -> float:
        """Return the predicted seconds until a request that comes now has its adapter."""
        adapter, books = self._adapters.get(key), self._books
        if adapter is None or adapter.error is not None:
            return 0.0
        draining = books.is_draining(key)
        if books.state(key) is State.RESIDENT and not draining:
            return 0.0
        ahead = {use.key for use in self._uses.values()} | set(self._under_way) | {key}
        opened = [self._adapters[each] for each in ahead if books.state(each) is not State.RESIDENT]
        num_bytes = sum(each.opened.num_bytes for each in opened if each.opened is not None)
        known = books.state(key) is State.KNOWN
        lacks_room = draining or (known and not books.has_room(key))
        return num_bytes * self._seconds_per_byte + lacks_room * self._room_seconds

    def lease(self, request_id: str, key: str, scale: float, due: float = math.inf) -> None:
        """Keep an adapter for a request until ``release_except``. Raises RequestError for one that
        failed or is unknown.

        Args:
            due: time at which its first token is due.
        """
        adapter = self._adapters.get(key)
        if adapter is None or adapter.forgotten or self._books.is_forgotten(key):
            raise UnknownModelError("the adapter of this request was unloaded", "model")
        _raise_failure(adapter)
        if request_id in self._uses:
            # one of the same name has ended, and was not looked at since
            self._release(request_id)
        self._uses[request_id] = _Use(key, scale, due)
        adapter.requests.add(request_id)
        if self._books.is_draining(key):
            adapter.behind.append(request_id)
        elif self._books.state(key) is not None:
            self._books.lease(key)

    def use_of(self, request_id: str) -> AdapterUse | None:
        """Return what the scheduler needs of a leased adapter; None: it is not resident yet.
        Raises RequestError for one that could not be loaded."""
        key, scale, _ = self._uses[request_id]
        adapter = self._adapters[key]
        _raise_failure(adapter)
        if self._books.state(key) is not State.RESIDENT or request_id in adapter.behind:
            return None
        opened = adapter.opened
        assert opened is not None
        contents = hashlib.sha256(adapter.digest.encode() + struct.pack("<d", scale)).digest()
        return AdapterUse(contents, adapter.slot, scale, opened.num_bytes, opened.num_products)

    def release_except(self, request_ids: Collection[str]) -> None:
        """End the leases of all requests but these."""
        for request_id in [each for each in self._uses if each not in request_ids]:
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        key = self._uses.pop(request_id).key
        adapter = self._adapters[key]
        adapter.requests.discard(request_id)
        if request_id in adapter.behind:
            adapter.behind.remove(request_id)
        elif self._books.num_leases(key):
            if self._books.release(key):
                self._gone(key)
        elif adapter.forgotten and not adapter.requests:
            self._gone(key)

    def poll(self, now: float, *, is_computing: bool = False) -> None:
        """Take in what the thread has done, and begin what there is room for now.

        Args:
            is_computing: steps run, which the thread that loads should not hold up.
        """
        self._is_computing = is_computing
        for key, adapter in list(self._under_way.items()):
            if adapter.opening is not None and adapter.opening.done():
                self._opened(key, adapter)
            if adapter.loading is not None and adapter.loading.done():
                self._loaded(key, adapter)
        self._tell_loading()
        for key in [each for each in self._wanted if self._adapters[each].pinned]:
            if self._books.state(key) is State.KNOWN and self._begin(key, self._adapters[key]):
                self._wanted.remove(key)
        is_blocked = False
        for key, _, due in list(self._uses.values()):
            adapter = self._adapters[key]
            known = self._books.state(key) is State.KNOWN and adapter.error is None
            # the oldest request that waits for room goes first: others would keep it out
            if known and not self._begin(key, adapter):
                self._wait_for_room(key, adapter, due, now)
                is_blocked = True
                break
            if known and self._blocked is not None and self._blocked[0] == key:
                waited = now - self._blocked[1]
                self._room_seconds += _FOLLOW * (waited - self._room_seconds)
                self._end_draining()
        if not is_blocked and self._blocked is not None:
            # its requests have ended
            self._end_draining()
        while self._wanted:
            key, adapter = self._wanted[0], self._adapters[self._wanted[0]]
            known = self._books.state(key) is State.KNOWN
            waits = known and (is_blocked or not self._begin(key, adapter))
            if waits and not self._has_no_room(key, adapter):
                return
            self._wanted.pop(0)

    def note_wait(self, seconds: float) -> None:
        """Count the wait of a request for its adapter."""
        self._wait_seconds += seconds

    def stats(self, running: Collection[str]) -> AdapterStats:
        """Return counts for metrics.

        Args:
            running: ids of the requests that run.
        """
        running_now, asked = Counter[str](), Counter[str]()
        for request_id, use in self._uses.items():
            (running_now if request_id in running else asked)[use.key] += 1
        waiting = asked.keys() - running_now.keys()
        busiest = [key for key, _ in (running_now + asked).most_common(_MOST_NAMES)]
        books, resident = self._books, self._books.resident()
        return AdapterStats(
            num_bytes=books.num_bytes, resident=tuple(resident[:_MOST_NAMES]),
            num_resident=len(resident),
            loads=tuple(self._loads.items()), load_seconds=self._load_seconds,
            gone=tuple(self._left.items()), wait_seconds=self._wait_seconds,
            running=tuple(key for key in busiest if key in running_now),
            waiting=tuple(key for key in busiest if key in waiting),
            num_others=len(running_now.keys() | waiting) - len(busiest),
        )  # fmt: skip

    def take_news(self) -> tuple[AdapterStatus, ...]:
        """Return what has changed since the last call."""
        news, self._news = tuple(self._news), []
        return news

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _opened(self, key: str, adapter: _Adapter) -> None:
        assert adapter.opening is not None
        opening, adapter.opening = adapter.opening, None
        del self._under_way[key]
        if (error := opening.exception()) is not None:
            self._fail(key, adapter, error)
            return
        adapter.opened = opened = opening.result()
        for note in opened.notes:
            _log.info("adapter=%s %s", adapter.path, note)
        self._books.register(key, opened.num_bytes)
        for _ in adapter.requests:
            self._books.lease(key)
        if adapter.forgotten:
            self._books.forget(key)
        elif adapter.pinned and not self._books.pin(key):
            size, places = _kib(adapter.opened.num_bytes), self._limits.max_count
            room = _kib(self._limits.max_bytes)
            self._fail(
                key, adapter,
                AdapterRoomError(
                    f"pinned, its {size} would leave no room for another one in {room} for "
                    "adapters" + (f", or in {places} places" if places else "")
                ),
            )  # fmt: skip
        elif adapter.digest and not adapter.pinned:
            self._news.append(AdapterStatus(key, "registered", digest=adapter.digest))
        else:
            self._wanted.append(key)

    def _wait_for_room(self, key: str, adapter: _Adapter, due: float, now: float) -> None:
        """Let another adapter drain once the oldest request for ``key`` has waited long enough."""
        if self._blocked is None or self._blocked[0] != key:
            self._end_draining()
            self._blocked = key, now
        assert adapter.opened is not None
        load = adapter.opened.num_bytes * self._seconds_per_byte
        since = self._blocked[1]
        if not self._drains and now >= min(since + max(_PATIENCE, _LOADS * load), due - load):
            self._drains = bool(self._books.drain_for(key))

    def _end_draining(self) -> None:
        self._blocked, self._drains = None, False
        self._books.end_draining()
        for key, adapter in self._adapters.items():
            for _ in adapter.behind:
                self._books.lease(key)
            adapter.behind.clear()

    def _open(self, path: str) -> OpenedAdapter:
        """Open on the store's own thread."""
        self._slices.begin()
        limits, pause = self._limits, self._slices.pause
        return self._backend.open_adapter(path, limits.max_rank, limits.dtype, pause)

    def _load(self, slot: int, opened: OpenedAdapter) -> _Loaded:
        """Load on the store's own thread."""
        began = self._clock()
        self._slices.begin()
        digest, num_bytes = self._backend.load_adapter(slot, opened, self._slices.pause)
        return _Loaded(digest, num_bytes, self._clock() - began)

    def _has_no_room(self, key: str, adapter: _Adapter) -> bool:
        """Fail an adapter that does not fit next to those in use; return whether it did."""
        in_use, taken = self._books.kept
        most, places, opened = self._limits.max_bytes, self._limits.max_count, adapter.opened
        assert opened is not None
        if opened.num_bytes + taken > most:
            message = (
                f"the adapter takes {_kib(opened.num_bytes)}, and of {_kib(most)} for adapters "
                f"{_kib(taken)} are in use"
            )
        elif places is not None and in_use >= places:
            message = f"of {places} places for adapters {in_use} are in use"
        else:
            # others are being loaded, or a request waits for its adapter first
            return False
        self._fail(key, adapter, AdapterRoomError(message))
        return True

    def _begin(self, key: str, adapter: _Adapter) -> bool:
        """Begin to load an adapter; return whether there is room."""
        going = self._books.admit(key)
        if going is None:
            return False
        for other in going:
            self._evict(other)
        adapter.slot, self._num_slots = self._num_slots, self._num_slots + 1
        opened = adapter.opened
        assert opened is not None
        self._under_way[key] = adapter
        self._tell_loading()
        adapter.loading = self._thread.submit(self._load, adapter.slot, opened)
        return True

    def _tell_loading(self) -> None:
        if self.on_loading is not None:
            self.on_loading(self._under_way.keys())

    def _loaded(self, key: str, adapter: _Adapter) -> None:
        assert adapter.loading is not None
        assert adapter.opened is not None
        loading, adapter.loading = adapter.loading, None
        del self._under_way[key]
        error, (digest, num_bytes, seconds) = loading.exception(), _Loaded("", 0, 0.0)
        if error is None:
            digest, num_bytes, seconds = loading.result()
            more = seconds / max(1, num_bytes) - self._seconds_per_byte
            self._seconds_per_byte += _FOLLOW * more
            self._load_seconds += seconds
            if adapter.digest not in ("", digest):
                self._backend.drop_adapter(adapter.slot)
                changed = f"{adapter.path} has changed since it was loaded: load it again"
                error = CheckpointError(changed)
        if error is not None:
            adapter.slot = -1
            if self._books.failed(key):
                self._gone(key)
            else:
                self._fail(key, adapter, error)
            return
        self._loads["loaded"] += 1
        adapter.seconds = seconds
        adapter.digest = digest
        if self._books.loaded(key, num_bytes):
            self._gone(key)
            return
        rank = adapter.opened.max_rank
        self._news.append(
            AdapterStatus(
                key, "resident", num_bytes=num_bytes, rank=rank, digest=digest, seconds=seconds
            )
        )

    def _fail(self, key: str, adapter: _Adapter, error: BaseException) -> None:
        known = error
        if not isinstance(known, PacelineError):
            known = CheckpointError(f"{adapter.path}: {type(error).__name__}: {error}")
        adapter.error = known
        kind = type(known).__name__
        self._loads["no_room" if isinstance(known, AdapterRoomError) else "failed"] += 1
        self._news.append(AdapterStatus(key, "failed", error=str(known), kind=kind))

    def _evict(self, key: str) -> None:
        adapter = self._adapters[key]
        self._backend.drop_adapter(adapter.slot)
        adapter.slot = -1
        self._left["room"] += 1
        self._news.append(
            AdapterStatus(key, "registered", digest=adapter.digest, seconds=adapter.seconds)
        )

    def _gone(self, key: str) -> None:
        adapter = self._adapters.pop(key)
        self._under_way.pop(key, None)
        if key in self._wanted:
            self._wanted.remove(key)
        if adapter.slot >= 0:
            self._left["unloaded"] += 1
            self._backend.drop_adapter(adapter.slot)
        self._news.append(AdapterStatus(key, "gone"))


def _raise_failure(adapter: _Adapter) -> None:
    if adapter.error is not None:
        raise InvalidRequestError(f"the adapter of this request: {adapter.error}", "model")


def _kib(num_bytes: int) -> str:
    return f"{-(-num_bytes // 1024)} KiB"
