"""The store over a fake backend: loads on its own thread, room, reloads, and the end of leases."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from paceline.engine.adapters.store import AdapterLimits, AdapterStore
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

    def open_adapter(self, path: str, max_rank: int | None, dtype: str) -> Opened:
        self.threads.add(threading.get_ident())
        assert self.may_open.wait(10)
        if path == "bad":
            raise CheckpointError("bad: use_dora=True is not served")
        return Opened(path, 50 if path == "large" else 10)

    def load_adapter(self, slot: int, opened: Opened) -> tuple[str, int]:
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


def settle(store: AdapterStore) -> dict[str, str]:
    """Wait until nothing is being loaded; return the latest status of each adapter in the news."""
    news: dict[str, str] = {}
    for _ in range(2000):
        store.poll()
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
    store.poll()
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
    def load_adapter(slot: int, opened: Opened) -> tuple[str, int]:
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
        store.poll()
        for request, key in live.items():
            if (use := store.use_of(request)) is not None:
                assert backend.slots[use.slot] == key
                served += 1
        store.books.check_integrity()
    settle(store)
    assert served > events // 4
    store.close()
