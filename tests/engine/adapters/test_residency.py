"""Adapters in memory: who goes, who stays, and that the books are right."""

from __future__ import annotations

import random

import pytest

from paceline.engine.adapters.residency import Residency, State


def resident(books: Residency, *keys: str, num_bytes: int = 10) -> None:
    for key in keys:
        books.register(key, num_bytes)
        assert books.admit(key) is not None
        books.loaded(key, num_bytes)


def test_the_one_used_longest_ago_goes() -> None:
    books = Residency(30)
    resident(books, "a", "b", "c")
    books.lease("a")
    books.release("a")
    books.register("d", 10)
    assert books.admit("d") == ["b"]
    assert books.state("b") is State.KNOWN
    assert books.num_bytes == 30


def test_nothing_goes_where_it_would_not_suffice() -> None:
    books = Residency(30)
    resident(books, "a", "b", "c")
    books.lease("a")
    books.lease("b")
    books.register("big", 15)
    assert books.admit("big") is None
    assert books.state("c") is State.RESIDENT
    assert books.kept == (2, 20)
    books.release("a")
    assert sorted(books.admit("big") or []) == ["a", "c"]


def test_a_number_bounds_as_bytes_do() -> None:
    books = Residency(1000, max_count=2)
    resident(books, "a", "b", "c")
    assert books.state("a") is State.KNOWN
    books.lease("b")
    books.lease("c")
    assert books.admit("a") is None


def test_a_forgotten_one_goes_with_its_last_lease() -> None:
    books = Residency(30)
    resident(books, "a")
    books.lease("a")
    books.lease("a")
    assert not books.forget("a")
    assert not books.release("a")
    assert books.num_bytes == 10
    assert books.release("a")
    assert books.state("a") is None
    assert books.num_bytes == 0


def test_one_forgotten_while_it_loads_goes_once_loaded() -> None:
    books = Residency(30)
    books.register("a", 10)
    books.admit("a")
    assert not books.forget("a")
    assert books.loaded("a", 8)
    assert books.num_bytes == 0


def test_a_pinned_one_goes_when_it_is_forgotten_alone() -> None:
    books = Residency(30)
    books.register("a", 10)
    assert books.pin("a")
    assert books.admit("a") == []
    books.loaded("a", 10)
    resident(books, "b", "c")
    books.register("d", 10)
    # it was used longest ago
    assert books.admit("d") == ["b"]
    books.loaded("d", 10)
    for key in "cd":
        books.lease(key)
    assert books.drain_for("b") == ["c"]
    assert (books.kept, books.resident()[-1]) == ((3, 30), ("a", True))
    assert books.forget("a")
    assert books.kept == (2, 20)


def test_a_pin_leaves_room_for_every_other_adapter() -> None:
    books = Residency(30, max_count=3)
    for key, size in {"a": 10, "b": 10, "c": 5, "large": 15}.items():
        books.register(key, size)
    assert books.pin("a")
    assert not books.pin("b")
    assert books.pin("c")
    # one place is left to the others
    books.forget("large")
    books.register("d", 5)
    assert not books.pin("d")
    books.check_integrity()


@pytest.mark.parametrize(
    ("events", "known"),
    [(5_000, 100), pytest.param(100_000, 1_000, marks=pytest.mark.thorough)],
)
def test_no_leased_one_ever_goes(events: int, known: int) -> None:
    """Random events over many adapters of which 32 fit."""
    rng, books = random.Random(1), Residency(32 * 12, max_count=32)
    sizes = {f"a{i}": rng.randint(6, 18) for i in range(known)}
    for key, size in sizes.items():
        books.register(key, size)
    pinned = {key for key in ("a0", "a3", f"a{known - 1}") if books.pin(key)}
    assert len(pinned) == 3
    leases: list[str] = []
    refused = loaded = 0
    for number in range(events):
        key = f"a{int(known * rng.random() ** 3)}"
        if rng.random() < 0.55 or not leases:
            if books.state(key) is State.KNOWN:
                going = books.admit(key)
                if going is None:
                    refused += 1
                    continue
                assert not set(going) & (pinned | set(leases))
                if rng.random() < 0.05:
                    books.failed(key)
                    continue
                books.loaded(key, sizes[key])
                loaded += 1
            books.lease(key)
            leases.append(key)
        else:
            books.release(leases.pop(rng.randrange(len(leases))))
        if number % 50 == 0:
            assert all(books.state(other) is State.RESIDENT for other in leases)
            books.check_integrity()
    assert loaded > 100
    assert refused > 0
    for key in leases:
        books.release(key)
    kept = [key for key in pinned if books.state(key) is State.RESIDENT]
    assert books.kept == (len(kept), sum(sizes[key] for key in kept))
    books.check_integrity()
