"""The store over a fake backend: loads on its own thread, room, reloads, and the end of leases."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.engine.adapters.interface import AdapterLimits
from paceline.engine.adapters.loading import Slices
from paceline.engine.adapters.store import AdapterStore
from paceline.errors import CheckpointError, InvalidRequestError, UnknownModelError


@dataclass(frozen=True)
class Opened:
    path: str
    num_bytes: int = 10
    num_products: int = 5
    max_rank: int = 4
    notes: tuple[str, ...] = ()


class Backend:
    """Adapters are their paths; "bad" is refused, "large" is large, and contents may change."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}
        self.contents: dict[str, str] = {}
        self.threads: set[int] = set()
        # files are opened once this is set
        self.may_open = threading.Event()
        self.may_open.set()

    def open_adapter(
        self, path: str, max_rank: int | None, dtype: str, pause: Callable[[], None]
    ) -> Opened:
        self.threads.add(threading.get_ident())
        assert self.may_open.wait(10)
        if path == "bad":
            raise CheckpointError("bad: use_dora=True is not served")
        return Opened(path, 50 if path == "large" else 10)

    def load_adapter(self, slot: int, opened: Any, pause: Callable[[], None]) -> tuple[str, int]:
        self.threads.add(threading.get_ident())
        self.slots[slot] = opened.path
        return self.contents.get(opened.path, opened.path), opened.num_bytes

    def drop_adapter(self, slot: int) -> None:
        del self.slots[slot]


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def store(backend: Backend) -> Iterator[AdapterStore]:
    made = AdapterStore(backend, AdapterLimits(max_bytes=30))
    yield made
    made.close()


def settle(store: AdapterStore, now: float = 0.0) -> dict[str, str]:
    """Wait until nothing is being loaded; return the latest status of each adapter in the news."""
    news: dict[str, str] = {}
    for _ in range(20_000):
        store.poll(now)
        news |= {each.key: f"{each.status} {each.kind}".strip() for each in store.take_news()}
        if not store.is_busy:
            return news
        time.sleep(0.001)
    raise AssertionError("still busy")


def test_nothing_is_loaded_on_the_callers_thread(store: AdapterStore, backend: Backend) -> None:
    store.register("a", "a")
    assert settle(store) == {"a": "resident"}
    assert threading.get_ident() not in backend.threads
    assert len(backend.threads) == 1


def test_a_request_waits_for_its_adapter_and_keeps_it(
    store: AdapterStore, backend: Backend
) -> None:
    for key in "abc":
        store.register(key, key)
    store.lease("r", "a", 1.0)
    settle(store)
    use = store.use_of("r")
    assert use is not None
    store.register("d", "d")
    store.register("e", "e")
    assert settle(store) == {"b": "registered", "c": "registered", "d": "resident", "e": "resident"}
    assert backend.slots[use.slot] == "a"
    store.lease("s", "b", 1.0)
    assert store.use_of("s") is None
    settle(store)
    found = store.use_of("s")
    assert found is not None
    assert backend.slots[found.slot] == "b"
    store.release_except({"s"})
    assert not store.books.num_leases("a")


def test_a_key_is_of_contents_and_scale(store: AdapterStore, backend: Backend) -> None:
    backend.contents = {"a": "same", "b": "same"}
    for key in "abc":
        store.register(key, key)
    settle(store)
    for request, key, scale in (("1", "a", 1.0), ("2", "b", 1.0), ("3", "a", 0.5), ("4", "c", 1.0)):
        store.lease(request, key, scale)
    one, two, half, other = (store.use_of(each) for each in "1234")
    assert one is not None and two is not None and half is not None and other is not None
    assert one.key == two.key
    assert one.slot != two.slot
    assert len({one.key, half.key, other.key}) == 3


def test_what_fails_says_why_to_requests_too(store: AdapterStore) -> None:
    store.register("x", "bad")
    store.lease("early", "x", 1.0)
    store.register("y", "large")
    assert settle(store) == {"x": "failed CheckpointError", "y": "failed AdapterRoomError"}
    with pytest.raises(InvalidRequestError, match="use_dora=True is not served"):
        store.use_of("early")
    with pytest.raises(InvalidRequestError, match="1 KiB"):
        store.lease("late", "y", 1.0)
    with pytest.raises(UnknownModelError):
        store.lease("late", "z", 1.0)


def test_memory_is_booked_before_it_is_taken(store: AdapterStore, backend: Backend) -> None:
    taken = []

    def load_adapter(slot: int, opened: Any, pause: Callable[[], None]) -> tuple[str, int]:
        taken.append((opened.path, store.books.num_bytes, len(backend.slots)))
        backend.slots[slot] = opened.path
        return opened.path, opened.num_bytes

    backend.load_adapter = load_adapter  # type: ignore[method-assign]
    for key in "abcdef":
        store.register(key, key)
    settle(store)
    # an adapter that makes room has left memory before the other comes
    assert len(taken) == 6
    assert all(booked <= 30 and 10 * held + 10 <= 30 for _, booked, held in taken)
    assert all(booked >= 10 * held + 10 for _, booked, held in taken)


def test_no_room_is_told_with_both_numbers(store: AdapterStore) -> None:
    for key in "abc":
        store.register(key, key)
        store.lease(key, key, 1.0)
    settle(store)
    store.register("d", "d")
    assert settle(store) == {"d": "failed AdapterRoomError"}


def test_contents_that_changed_are_not_served_under_the_old_name(
    store: AdapterStore, backend: Backend
) -> None:
    for key in "abcd":
        store.register(key, key)
    settle(store)
    backend.contents["a"] = "other"
    store.lease("r", "a", 1.0)
    assert settle(store) == {"a": "failed CheckpointError", "b": "registered"}
    with pytest.raises(InvalidRequestError, match="has changed since it was loaded"):
        store.use_of("r")
    assert "a" not in backend.slots.values()


def test_a_forgotten_adapter_goes_with_its_last_request(
    store: AdapterStore, backend: Backend
) -> None:
    store.register("a", "a")
    store.lease("r", "a", 1.0)
    settle(store)
    store.forget("a")
    assert store.use_of("r") is not None
    # a request that had looked its name up before
    with pytest.raises(UnknownModelError, match="was unloaded"):
        store.lease("late", "a", 1.0)
    store.release_except(set())
    assert settle(store) == {"a": "gone"}
    assert not backend.slots
    assert store.books.num_bytes == 0
    store.forget("a")


def test_requests_outlive_a_name_that_is_forgotten_before_its_file_is_open(
    store: AdapterStore, backend: Backend
) -> None:
    backend.may_open.clear()
    for key, path in (("a", "a"), ("x", "bad"), ("b", "b")):
        store.register(key, path, "a" if key == "a" else "")
        store.lease(f"of {key}", key, 1.0)
        store.forget(key)
    store.poll(0.0)
    store.release_except({"of a", "of x"})
    backend.may_open.set()
    settle(store)
    use = store.use_of("of a")
    assert use is not None
    assert backend.slots == {use.slot: "a"}
    with pytest.raises(InvalidRequestError, match="use_dora=True is not served"):
        store.use_of("of x")
    store.release_except(set())
    assert {each.key for each in store.take_news() if each.status == "gone"} == {"a", "x"}
    assert not backend.slots


def test_what_failed_and_was_forgotten_leaves_nothing_behind(store: AdapterStore) -> None:
    for number, path in enumerate(("bad", "large")):
        store.register(f"x{number}", path)
        settle(store)
        store.forget(f"x{number}")
        assert [(each.key, each.status) for each in store.take_news()] == [(f"x{number}", "gone")]


def test_an_adapter_of_an_earlier_engine_is_loaded_on_request_with_its_contents(
    store: AdapterStore, backend: Backend
) -> None:
    for key in "abc":
        store.register(key, key)
        store.lease(key, key, 1.0)
    settle(store)
    # no room is left, which is no reason to refuse later requests
    for key, digest in (("d", "d"), ("e", "before")):
        store.register(key, key, digest)
    assert settle(store) == {"d": "registered", "e": "registered"}
    assert sorted(backend.slots.values()) == ["a", "b", "c"]
    store.release_except(set())
    store.lease("r", "d", 1.0)
    store.lease("s", "e", 1.0)
    settle(store)
    assert store.use_of("r") is not None
    with pytest.raises(InvalidRequestError, match="has changed since it was loaded"):
        store.use_of("s")


def test_a_later_engine_loads_pinned_adapters_before_those_of_resumed_requests(
    store: AdapterStore, backend: Backend
) -> None:
    backend.may_open.clear()
    # as the supervisor tells it, and the requests that it sends again
    store.register("pinned", "pinned", "pinned", pinned=True)
    for key in "abc":
        store.register(key, key, key)
    store.lease("r", "b", 1.0)
    store.lease("s", "a", 1.0)
    store.poll(0.0)
    backend.may_open.set()
    # all of them are open before anything is loaded
    while not all(each.opening is None or each.opening.done() for each in store._adapters.values()):
        time.sleep(0.001)
    assert settle(store)["c"] == "registered"
    # slots are numbered by the loads
    assert backend.slots == {0: "pinned", 1: "b", 2: "a"}
    # and it stays, though no request has named it
    store.lease("t", "c", 1.0)
    settle(store, 100.0)
    assert 0 in backend.slots and store.use_of("t") is None
    store.release_except({"r", "t"})
    settle(store, 101.0)
    assert sorted(backend.slots.values()) == ["b", "c", "pinned"]
    assert dict(store.stats(()).resident) == {"c": False, "b": False, "pinned": True}
    # what was unloaded is not kept
    store.forget("pinned")
    assert sorted(backend.slots.values()) == ["b", "c"]


def test_a_pin_without_room_is_refused_with_both_numbers(
    store: AdapterStore, backend: Backend
) -> None:
    store.register("a", "a")
    store.register("large", "large")
    settle(store)
    store.forget("large")
    for key in "bc":
        store.register(key, key, pinned=True)
    assert settle(store) == {"large": "gone", "b": "resident", "c": "resident"}
    store.register("d", "d", pinned=True)
    assert settle(store) == {"d": "failed AdapterRoomError"}
    with pytest.raises(InvalidRequestError, match="no room for another one in 1 KiB"):
        store.lease("r", "d", 1.0)
    store.forget("d")
    # and what is loaded later knows of the pins
    store.lease("r", "a", 1.0)
    store.register("e", "e")
    assert settle(store) == {"d": "gone", "e": "failed AdapterRoomError"}


def test_a_request_with_the_name_of_one_that_has_ended_holds_one_lease(store: AdapterStore) -> None:
    for key in "ab":
        store.register(key, key)
        settle(store)
        store.lease("r", key, 1.0)
    assert (store.books.num_leases("a"), store.books.num_leases("b")) == (0, 1)
    store.lease("r", "b", 0.5)
    store.release_except(())
    assert not store.books.num_leases("b")


def test_an_error_without_a_text_is_named(store: AdapterStore, backend: Backend) -> None:
    def load_adapter(slot: int, opened: Any, pause: Callable[[], None]) -> tuple[str, int]:
        raise MemoryError

    backend.load_adapter = load_adapter  # type: ignore[method-assign]
    store.register("a", "a")
    settle(store)
    with pytest.raises(InvalidRequestError, match="a: MemoryError"):
        store.lease("r", "a", 1.0)


def test_places_in_use_are_told_too(backend: Backend) -> None:
    store = AdapterStore(backend, AdapterLimits(max_bytes=100, max_count=1))
    store.register("a", "a")
    store.lease("r", "a", 1.0)
    settle(store)
    store.register("b", "b")
    assert settle(store) == {"b": "failed AdapterRoomError"}
    # also behind a request that waits for its place
    store.register("c", "c", "c")
    store.lease("s", "c", 1.0)
    store.register("d", "d")
    assert settle(store) == {"c": "registered", "d": "failed AdapterRoomError"}
    store.release_except({"s"})
    settle(store)
    assert store.use_of("s") is not None
    store.close()


@pytest.mark.parametrize("events", [300, pytest.param(5_000, marks=pytest.mark.thorough)])
def test_requests_find_their_own_adapter_whatever_happens(events: int, backend: Backend) -> None:
    """Requests come and go over more adapters than fit; each that is ready has its own contents."""
    rng = random.Random(2)
    store = AdapterStore(backend, AdapterLimits(max_bytes=80))
    keys = [f"a{i}" for i in range(40)]
    for key in keys:
        store.register(key, key)
    live: dict[str, str] = {}
    served = 0
    for number in range(events):
        if len(live) < 6 and rng.random() < 0.6:
            key = keys[int(40 * rng.random() ** 2)]
            store.lease(f"r{number}", key, 1.0)
            live[f"r{number}"] = key
        elif live:
            gone = rng.choice(list(live))
            del live[gone]
            store.release_except(set(live))
        if rng.random() < 0.5:
            settle(store)
        store.poll(0.0)
        for request, key in live.items():
            if (use := store.use_of(request)) is not None:
                assert backend.slots[use.slot] == key
                served += 1
        store.books.check_integrity()
    settle(store)
    assert served > events // 4
    store.close()


def test_an_adapter_drains_for_one_that_has_waited_and_later_requests_wait_behind_it(
    store: AdapterStore, backend: Backend
) -> None:
    """A flood of a, b and c keeps all places taken; d gets one when a's requests under way end."""
    for key in "abcd":
        store.register(key, key, key)
        settle(store)
    for name, key in (("a0", "a"), ("b0", "b"), ("b1", "b"), ("c0", "c"), ("c1", "c")):
        store.lease(name, key, 1.0)
    settle(store)
    live = {"a0", "b0", "b1", "c0", "c1", "cold"}
    store.lease("cold", "d", 1.0)
    settle(store, 10.0)
    store.lease("a1", "a", 1.0)
    assert store.use_of("a1") is not None
    # a has two requests now, like the others, and comes first among them
    settle(store, 11.0)
    assert [store.books.is_draining(key) for key in "abc"] == [True, False, False]
    for name in ("a2", "a3"):
        store.lease(name, "a", 1.0)
        assert store.use_of(name) is None
    assert store.wait("a") > 0.9
    store.release_except({*live, "a1", "a2", "a3"} - {"a0"})
    settle(store, 12.0)
    assert store.use_of("cold") is None
    live -= {"a0"}
    # requests behind it may leave too
    store.release_except({*live, "a2"})
    settle(store, 13.0)
    assert store.use_of("cold") is not None
    assert not store.books.is_draining("a")
    # now a is the cold one, and the next to drain is not what was waited for
    settle(store, 14.0)
    settle(store, 15.0)
    assert store.use_of("a2") is None
    store.release_except({*live, "a2"} - {"b0", "b1", "c0", "c1", "cold"})
    settle(store, 16.0)
    assert store.use_of("a2") is not None
    store.books.check_integrity()


def test_draining_ends_with_the_request_that_it_was_for(
    store: AdapterStore, backend: Backend
) -> None:
    for key in "abcd":
        store.register(key, key, key)
    for key in "abc":
        store.lease(key, key, 1.0)
    settle(store)
    store.lease("cold", "d", 1.0, due=0.5)
    # its first token is due before a second has passed
    settle(store, 0.0)
    assert not store.books.is_draining("a")
    settle(store, 0.6)
    store.lease("late", "a", 1.0)
    assert store.use_of("late") is None
    store.forget("a")
    assert store.use_of("late") is not None
    settle(store, 2.0)
    settle(store, 4.0)
    assert store.books.is_draining("b")
    # one that is forgotten drains on, and goes with its last request: none may wait behind it
    store.forget("b")
    with pytest.raises(UnknownModelError):
        store.lease("behind", "b", 1.0)
    store.release_except({"a", "b", "c", "late"})
    settle(store, 5.0)
    assert not store.books.is_draining("b")
    store.lease("more", "c", 1.0)
    assert store.use_of("more") is not None


def test_the_wait_for_an_adapter_is_learned(store: AdapterStore, backend: Backend) -> None:
    def load_adapter(slot: int, opened: Any, pause: Callable[[], None]) -> tuple[str, int]:
        time.sleep(0.05)
        backend.slots[slot] = opened.path
        return opened.path, opened.num_bytes

    backend.load_adapter = load_adapter  # type: ignore[method-assign]
    for key in "abcd":
        store.register(key, key)
    before = store.wait("a")
    settle(store)
    # three fit, and d is the last of them
    assert [store.wait(key) > 0.0 for key in "abcd"] == [True, False, False, False]
    assert store.wait("a") > before + 0.02
    assert store.wait("unknown") == 0.0
    alone = store.wait("a")
    for key in "bcd":
        store.lease(key, key, 1.0)
    assert store.wait("a") >= alone + 1.0


def test_loading_sleeps_between_slices_only_while_steps_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computing, slept, used = False, list[float](), 0.0
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "thread_time", lambda: used)
    slices = Slices(lambda: computing)
    slices.begin()
    used = 1.0
    slices.pause()
    assert not slept
    computing = True
    slices.pause()
    slices.pause()
    assert len(slept) == 1
    used = 2.0
    slices.pause()
    assert len(slept) == 2


def test_stats_name_a_running_adapter_in_running_alone(store: AdapterStore) -> None:
    for key in "abcd":
        store.register(key, key, key)
    for request_id, key in (("1", "a"), ("2", "a"), ("3", "b"), ("4", "d")):
        store.lease(request_id, key, 1.0)
    settle(store)
    assert store.stats({"1"}).running == ("a",)
    assert sorted(store.stats({"1"}).waiting) == ["b", "d"]
    assert store.stats(set()).running == ()
    store.note_wait(0.5)
    store.release_except(set())
    store.forget("a")
    store.register("x", "bad")
    settle(store)
    found = store.stats(set())
    assert dict(found.loads) == {"loaded": 3, "failed": 1}
    assert dict(found.gone) == {"unloaded": 1}
    assert (found.num_bytes, found.num_resident, found.wait_seconds) == (20, 2, 0.5)
    assert dict(found.resident) == {"b": False, "d": False}
    assert found.waiting == found.running == ()
