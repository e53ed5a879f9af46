"""What an engine process does about the garbage collector."""

from __future__ import annotations

import gc
import weakref

from paceline.engine.process.garbage import collected_seldom, uncollected


class Cycle:
    def __init__(self) -> None:
        self.myself = self


def test_steps_cause_no_collections_and_rest_still_finds_cycles() -> None:
    gc.collect()
    before = gc.get_threshold()
    with collected_seldom():
        collections = sum(generation["collections"] for generation in gc.get_stats())
        lost = weakref.ref(Cycle())
        # as a step: many small tuples, all dead by the next
        for _ in range(20):
            rows = [(str(i), [i]) for i in range(256)]
            rows.clear()
        assert sum(generation["collections"] for generation in gc.get_stats()) == collections
        assert lost() is not None
        gc.collect()
        assert lost() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_was_there_before_is_not_looked_at() -> None:
    old = Cycle()
    found = weakref.ref(old)
    with collected_seldom():
        del old
        gc.collect()
        assert found() is not None
    gc.collect()
    assert found() is None


def test_a_start_is_not_looked_at() -> None:
    assert gc.isenabled()
    collections = sum(generation["collections"] for generation in gc.get_stats())
    with uncollected():
        kept = [[str(i)] for i in range(100_000)]
        assert sum(generation["collections"] for generation in gc.get_stats()) == collections
    assert gc.isenabled() and len(kept) == 100_000
    gc.disable()
    try:
        with uncollected():
            pass
        # whoever had it off before keeps it off
        assert not gc.isenabled()
    finally:
        gc.enable()
