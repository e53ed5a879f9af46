"""Adapters in memory: bytes, leases, and the choice of those that go for another.

::

    register --> known --admit--> loading --loaded--> resident --(evicted by an admit)--> known
                                     `-----failed-----> known
    forget: it goes at once, or with its last lease

A *lease* is one request's, from before its adapter is loaded to its last token. Leased, pinned and
loading adapters never go. Of the others the one goes whose last lease ended first.

A leased adapter can *drain*: it takes no new leases, so that it becomes idle and makes room for one
that requests wait for. ``end_draining`` ends that, whether it has gone or not.

This module does not know files, threads, backends or the clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["Residency", "State"]


class State(Enum):
    KNOWN = auto()
    LOADING = auto()
    RESIDENT = auto()


@dataclass(slots=True, eq=False)
class _Entry:
    num_bytes: int
    state: State = State.KNOWN
    # number of the newest event about it: the adapter with the smallest is the least recently used
    used: int = 0
    # it goes as soon as no request has a lease
    forgotten: bool = False
    # it takes no new lease, so that it can make room
    draining: bool = False
    # it stays in memory until it is forgotten
    pinned: bool = False


class Residency:
    """Books of the adapters in memory; every method changes them at once.

    Args:
        max_bytes: of all adapters that are loading or resident.
        max_count: the same in number; None: any number.
    """

    def __init__(self, max_bytes: int, max_count: int | None = None) -> None:
        self.max_bytes, self._max_count = max_bytes, max_count
        self._entries: dict[str, _Entry] = {}
        self._leases: Counter[str] = Counter()
        self._num_events = 0
        self.num_bytes = 0
        self.num_evicted = 0

    def state(self, key: str) -> State | None:
        """Return the state of an adapter; None: it is not registered, or forgotten and gone."""
        entry = self._entries.get(key)
        return None if entry is None else entry.state

    def num_leases(self, key: str) -> int:
        return self._leases[key]

    @property
    def kept(self) -> tuple[int, int]:
        """Number and bytes of adapters in memory that are pinned or in use."""
        sizes = [
            entry.num_bytes
            for key, entry in self._entries.items()
            if entry.state is not State.KNOWN and (entry.pinned or self._leases[key])
        ]
        return len(sizes), sum(sizes)

    def resident(self) -> list[tuple[str, bool]]:
        """Return adapters in memory and whether each is pinned, the one used last first."""
        found = [(k, e) for k, e in self._entries.items() if e.state is State.RESIDENT]
        found.sort(key=lambda each: each[1].used, reverse=True)
        return [(key, entry.pinned) for key, entry in found]

    @property
    def num_resident(self) -> int:
        return sum(entry.state is State.RESIDENT for entry in self._entries.values())

    def register(self, key: str, num_bytes: int) -> None:
        """Add an adapter that is not in memory. Keys are used once."""
        assert key not in self._entries, f"adapter {key} is registered"
        self._entries[key] = _Entry(num_bytes)

    def pin(self, key: str) -> bool:
        """Keep a registered adapter in memory once it is there; return False, with nothing changed,
        if some registered adapter could then never be in memory."""
        entry = self._entries[key]
        pinned = [e.num_bytes for e in self._entries.values() if e.pinned or e is entry]
        others = [e.num_bytes for e in self._entries.values() if not e.pinned and e is not entry]
        places = len(pinned) + bool(others)
        entry.pinned = sum(pinned) + max(others, default=0) <= self.max_bytes and (
            self._max_count is None or places <= self._max_count
        )
        return entry.pinned

    def is_forgotten(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.forgotten

    def lease(self, key: str) -> None:
        """Keep a registered adapter, which does not drain, until ``release``."""
        assert key in self._entries, f"adapter {key} is not registered"
        assert not self._entries[key].draining, f"adapter {key} is draining"
        self._leases[key] += 1
        self._touch(key)

    def release(self, key: str) -> bool:
        """End one lease; return whether the adapter, forgotten before, is gone with it."""
        assert self._leases[key] > 0, f"adapter {key} has no lease"
        self._leases[key] -= 1
        self._touch(key)
        return self._drop_if_done(key)

    def forget(self, key: str) -> bool:
        """Let an adapter go as soon as no request uses it; return whether it is gone now."""
        self._entries[key].forgotten = True
        return self._drop_if_done(key)

    def admit(self, key: str) -> list[str] | None:
        """Book memory for a known adapter, which is loading from now on. Returns the adapters that
        go for it; None, with nothing changed, if leased ones leave no room."""
        wanted = self._entries[key]
        assert wanted.state is State.KNOWN, f"adapter {key} is {wanted.state.name}"
        going = self._making_room(key, self._idle())
        if going is None:
            return None
        for other in going:
            self._leave_memory(other)
        self.num_evicted += len(going)
        wanted.state = State.LOADING
        self.num_bytes += wanted.num_bytes
        self._touch(key)
        return going

    def has_room(self, key: str) -> bool:
        """Return whether ``admit`` would find room for a known adapter."""
        return self._making_room(key, self._idle()) is not None

    def drain_for(self, key: str) -> list[str]:
        """Let adapters in use become idle until there is room for a known one: first those with the
        fewest requests. Returns those that drain for it now."""
        resident = [
            each
            for each, entry in self._entries.items()
            if entry.state is State.RESIDENT and not entry.pinned
        ]
        going = self._making_room(key, sorted(resident, key=self._leases.__getitem__)) or []
        for other in going:
            self._entries[other].draining = True
        return going

    def is_draining(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.draining

    def end_draining(self) -> None:
        """Let all adapters take new leases."""
        for entry in self._entries.values():
            entry.draining = False

    def _making_room(self, key: str, candidates: list[str]) -> list[str] | None:
        """Return the first of some resident adapters without which a known one fits; None: it would
        not fit without all of them."""
        held = sum(entry.state is not State.KNOWN for entry in self._entries.values())
        room = self.max_bytes - self.num_bytes - self._entries[key].num_bytes
        places = held + 1 if self._max_count is None else self._max_count
        excess, going = held + 1 - places, list[str]()
        for other in candidates:
            if room >= 0 and excess <= 0:
                break
            going.append(other)
            room += self._entries[other].num_bytes
            excess -= 1
        return None if room < 0 or excess > 0 else going

    def loaded(self, key: str, num_bytes: int) -> bool:
        """Note that an adapter is resident, with its true size, at most what was booked. Returns
        whether it is gone already, since it was forgotten meanwhile."""
        entry = self._entries[key]
        assert entry.state is State.LOADING, f"adapter {key} is {entry.state.name}"
        assert num_bytes <= entry.num_bytes, f"{num_bytes} bytes of {entry.num_bytes} booked"
        self.num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes, entry.state = num_bytes, State.RESIDENT
        self._touch(key)
        return self._drop_if_done(key)

    def failed(self, key: str) -> bool:
        """Give back what was booked for an adapter that could not be loaded; return whether it is
        gone, since it was forgotten meanwhile."""
        assert self._entries[key].state is State.LOADING
        self._leave_memory(key)
        return self._drop_if_done(key)

    def _idle(self) -> list[str]:
        """Return the resident adapters without a lease, the one used last at the end."""
        idle = [
            key
            for key, entry in self._entries.items()
            if entry.state is State.RESIDENT and not entry.pinned and not self._leases[key]
        ]
        return sorted(idle, key=lambda key: self._entries[key].used)

    def _touch(self, key: str) -> None:
        self._num_events += 1
        self._entries[key].used = self._num_events

    def _leave_memory(self, key: str) -> None:
        entry = self._entries[key]
        assert not self._leases[key] or entry.state is State.LOADING, f"adapter {key} is leased"
        self.num_bytes -= entry.num_bytes
        entry.state = State.KNOWN

    def _drop_if_done(self, key: str) -> bool:
        entry = self._entries[key]
        if not entry.forgotten or self._leases[key] or entry.state is State.LOADING:
            return False
        if entry.state is State.RESIDENT:
            self._leave_memory(key)
        del self._entries[key], self._leases[key]
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sums are right and within their bounds."""
        held = [entry for entry in self._entries.values() if entry.state is not State.KNOWN]
        assert self.num_bytes == sum(entry.num_bytes for entry in held) <= self.max_bytes
        assert self._max_count is None or len(held) <= self._max_count
        assert sum(e.num_bytes for e in self._entries.values() if e.pinned) <= self.max_bytes
        assert all(count >= 0 for count in self._leases.values())
