"""Blocks leave the pool and come back with the same content, or are computed again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue

import pytest

from paceline.core.memory.kv_cache import hash_prefix
from paceline.engine.blocks.keeper import Asked
from paceline.engine.blocks.link import Link
from paceline.engine.blocks.store import MemoryStore
from tests.engine.blocks.rig import SOURCE, Engine, Inline, connect

BLOCK = 4 * 8


def prompt(number: int, length: int = 33) -> list[int]:
    return [number, *range(length - 1)]


def settle(engine: Engine) -> None:
    """Wait until all copies on their way are in the store."""
    assert engine.keeper._writer is not None
    engine.keeper._writer.submit(lambda: None).result(30)


def fetched(engine: Engine) -> dict[tuple[str, str], int]:
    return engine.keeper.fetched


def kept_prompt() -> MemoryStore:
    """Return a store in which an engine that has ended left the blocks of ``prompt(0)``."""
    store = MemoryStore(BLOCK)
    first = Engine(store)
    first.answer("a", prompt(0))
    first.core.close()
    return store


def test_what_the_pool_evicts_is_read_back() -> None:
    store = MemoryStore(BLOCK)
    engine = Engine(store, num_blocks=12)
    for number in range(4):
        engine.answer(f"a{number}", prompt(number))
        settle(engine)
    assert fetched(engine) == {}
    engine.answer("again", prompt(0))
    assert fetched(engine) == {("disk", "hit"): 32}
    assert engine.cached["again"] == 32
    stats = engine.keeper.stats()
    assert stats.fetched == (("disk", "hit", 32),) and stats.store_up


def test_the_end_saves_what_can_be_found_and_a_next_engine_reads_it() -> None:
    store = MemoryStore(BLOCK)
    first = Engine(store)
    first.answer("a", prompt(0), 8)
    assert not store.blocks
    first.core.close()
    assert len(store.blocks) == 9, "full blocks of 33 + 8 - 1 tokens, registered as planned"
    second = Engine(store)
    second.answer("a", prompt(0), 8)
    assert fetched(second) == {("disk", "hit"): 32}


def test_idle_engines_save_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.blocks.keeper._IDLE_BYTES", 3 * BLOCK)
    store = MemoryStore(BLOCK)
    engine = Engine(store)
    engine.answer("a", prompt(0))
    found = []
    for _ in range(5):
        engine.keeper.save_idle(engine.core.num_steps)
        settle(engine)
        found.append(len(store.blocks))
    assert found == [3, 6, 8, 8, 8]
    # first what begins the prompt: a rest alone is of no use
    hashes = hash_prefix(prompt(0), 4)
    assert store.find(hashes) == len(hashes)


def test_what_failed_is_in_no_store() -> None:
    store = MemoryStore(BLOCK)
    engine = Engine(store, poison_token=77)
    engine.answer("a", [1, *range(11)])
    engine.keeper.save_idle(engine.core.num_steps)
    settle(engine)
    hashes = hash_prefix([1, *range(11)], 4)
    assert store.find(hashes) == 2
    # it shares two blocks with a request whose logits are not finite
    engine.add("b", [1, *range(11), 77, 5, 5, 5, 5])
    engine.run()
    assert engine.ended["b"] == "error"
    engine.answer("c", prompt(2))
    settle(engine)
    assert store.find(hashes) == 0


def test_what_failed_last_is_in_no_store_after_the_end() -> None:
    store = MemoryStore(BLOCK)
    engine = Engine(store, poison_token=77)
    engine.answer("a", [1, *range(11)])
    engine.keeper.save_idle(engine.core.num_steps)
    settle(engine)
    engine.add("b", [1, *range(11), 77, 5, 5, 5, 5])
    engine.run()
    engine.core.close()
    assert store.find(hash_prefix([1, *range(11)], 4)) == 0


def test_a_full_queue_leaves_blocks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.blocks.keeper._MOST_WAITING", 2 * BLOCK)
    store = MemoryStore(BLOCK)
    engine = Engine(store, num_blocks=12)
    engine.answer("a", prompt(0))
    engine.answer("b", prompt(1))
    settle(engine)
    assert store.counts.errors["busy"] > 0 and len(store.blocks) < 9
    engine.answer("a again", prompt(0))


def test_a_store_that_failed_is_left_alone() -> None:
    store = MemoryStore(BLOCK)
    store.counts.failure = "the disk is full"
    engine = Engine(store, num_blocks=12)
    for number in range(3):
        engine.answer(f"a{number}", prompt(number))
    engine.keeper.save_idle(engine.core.num_steps)
    engine.core.close()
    assert not store.blocks and not engine.keeper.stats().store_up


def test_a_peer_gets_what_was_computed_and_not_what_was_only_planned() -> None:
    engine = Engine()
    engine.add("a", prompt(0), 20)
    engine.step()
    assert engine.core.num_planned > engine.core.num_steps
    hashes, answers = hash_prefix(prompt(0), 4), list[bytes]()
    engine.keeper.ask(Asked([*hashes, bytes(32)], answers.append))
    engine.keeper.poll(engine.core.num_steps, engine.core.num_planned)
    assert not answers and engine.keeper.is_busy, "a step under way may have computed it"
    engine.run()
    assert [len(each) for each in answers] == [8 * BLOCK]
    assert engine.keeper.stats().sent_tokens == 32
    engine.keeper.ask(Asked([bytes(32)], answers.append))
    engine.keeper.poll(engine.core.num_steps, engine.core.num_planned)
    assert answers[1] == b""


def test_a_peer_gets_nothing_that_failed_meanwhile() -> None:
    engine = Engine(poison_token=77)
    engine.add("a", [*prompt(0), 77, 1, 1, 1])
    engine.step()
    answers = list[bytes]()
    engine.keeper.ask(Asked(hash_prefix(prompt(0), 4), answers.append))
    engine.run()
    assert engine.ended["a"] == "error" and answers == [b""]


def test_a_stream_moves_with_its_blocks() -> None:
    first, second = Engine(), Engine()
    connect(second, first)
    first.add("a", prompt(0), 20)
    while len(first.tokens["a"]) < 11:
        first.step()
    first.abort("a")
    made = first.tokens["a"]
    assert second.add("a", prompt(0), 20, behind=made, source=SOURCE)
    second.answer("a2", prompt(0), 20)
    second.run()
    assert second.tokens["a"] == second.tokens["a2"]
    whole = (33 + len(made) - 1) // 4
    assert fetched(second) == {("peer", "hit"): 4 * whole}
    assert second.cached["a"] == 4 * whole


@pytest.mark.parametrize(
    ("fault", "result", "came"),
    [("lost", "error", 0), ("late", "late", 1), ("half", "gone", 1), ("evicted", "gone", 0)],
)
def test_what_does_not_come_is_computed(fault: str, result: str, came: int) -> None:
    first, second = Engine(), Engine()
    first.answer("a", prompt(0))
    connect(second, first, [fault])
    second.answer("a", prompt(0), source=SOURCE)
    expected = {("peer", result): 32 - 4 * came}
    assert fetched(second) == expected | ({("peer", "hit"): 4} if came else {})


def test_another_fingerprint_or_no_key_asks_nobody() -> None:
    engine = Engine()
    assert not engine.add("a", prompt(0), source=SOURCE)
    engine.run()
    assert fetched(engine) == {}


def test_disk_first_and_then_the_peer() -> None:
    store = MemoryStore(BLOCK)
    first, second = Engine(), Engine(store)
    first.answer("a", prompt(0))
    for block_hash in hash_prefix(prompt(0), 4)[:3]:
        answers = list[bytes]()
        first.keeper.ask(Asked([block_hash], answers.append))
        first.run()
        store.write([block_hash], answers[0])
    connect(second, first)
    second.answer("a", prompt(0), source=SOURCE)
    assert fetched(second) == {("disk", "hit"): 12, ("peer", "hit"): 20}


def test_a_broken_block_on_disk_ends_the_run_there() -> None:
    store = kept_prompt()
    store.broken.add(hash_prefix(prompt(0), 4)[2])
    second = Engine(store)
    second.answer("a", prompt(0))
    assert fetched(second) == {("disk", "hit"): 8, ("disk", "gone"): 24}


def test_a_deadline_ends_the_wait_and_one_fetch_serves_all_who_share_it() -> None:
    store = kept_prompt()
    executor = Inline(waits=True)
    second = Engine(store, executor=executor)
    assert second.add("a", prompt(0)) and second.add("b", [*prompt(0), 1, 2, 3, 4, 5])
    assert not second.add("c", prompt(5)), "others are not held up"
    assert len(executor.queue) == 1 and second.arrivals.request_ids == ("a", "b")
    second.step()
    assert len(second.arrivals) == 2 and second.tokens["c"]
    second.abort("a")
    assert second.ended["a"] == "abort" and len(second.arrivals) == 1
    second.now = 0.6
    second.run()
    assert len(second.tokens["b"]) == 4 and fetched(second) == {("disk", "late"): 32}
    # the thread comes to it later, and finds that nothing is wanted
    executor.run()
    assert store.counts.read_bytes == 0


def test_a_wait_is_worth_a_quarter_of_computing() -> None:
    store = kept_prompt()
    second = Engine(store, executor=Inline(waits=True), computing=1.0)
    assert second.add("a", prompt(0))
    second.now = 7.9
    second.step()
    assert second.arrivals
    second.now = 8.1
    second.step()
    assert not second.arrivals


class Slow(MemoryStore):
    """One of whose blocks come when the test says so."""

    def __init__(self) -> None:
        super().__init__(BLOCK)
        self.gates: list[threading.Event] = []
        self.came = threading.Semaphore(0)

    def read(self, hashes: Sequence[bytes], left: Callable[[], float]) -> Iterator[bytes]:
        for each, gate in zip(hashes, self.gates, strict=False):
            yield self.blocks[each]
            self.came.release()
            assert gate.wait(60)


@pytest.mark.parametrize(("came", "goes_on"), [(1, False), (3, True)])
def test_a_fetch_goes_on_if_its_rest_comes_sooner_than_computed(came: int, goes_on: bool) -> None:
    store = Slow()
    first = Engine(store)
    first.answer("a", prompt(0))
    first.core.close()
    store.gates = [threading.Event() for _ in range(8)]
    # five seconds a block, so the first deadline is a quarter of 40 s
    second = Engine(store, computing=5.0 / 4)
    second.arrivals._executor = ThreadPoolExecutor(1)
    second.add("a", prompt(0))
    for number in range(came):
        assert store.came.acquire(timeout=60)
        if number < came - 1:
            store.gates[number].set()
    second.now = 10.01
    second.step()
    # one block in that time: 70 s for the rest; three: 17 s, and 25 s to compute it
    assert bool(second.arrivals) == goes_on
    second.now = 50.0
    second.step()
    assert not second.arrivals, "four times as long is the most"
    for gate in store.gates:
        gate.set()
    second.run()
    second.arrivals.close()
    assert len(second.tokens["a"]) == 4 and fetched(second)["disk", "hit"] == 4 * came


def test_one_that_comes_while_blocks_land_joins_their_fetch() -> None:
    store = Slow()
    first = Engine(store)
    first.answer("a", prompt(0))
    first.core.close()
    store.gates = [threading.Event() for _ in range(8)]
    second = Engine(store)
    second.arrivals._executor = ThreadPoolExecutor(2)
    second.add("a", prompt(0))
    for number in range(3):
        assert store.came.acquire(timeout=60)
        if number < 2:
            store.gates[number].set()
    second.step()
    assert fetched(second) == {("disk", "hit"): 12} and second.arrivals
    second.add("b", [*prompt(0), 5])
    assert len(second.arrivals._fetches) == 1 and second.arrivals.request_ids == ("a", "b")
    for gate in store.gates:
        gate.set()
    second.run()
    second.arrivals.close()
    assert fetched(second) == {("disk", "hit"): 32}
    assert second.cached == {"a": 32, "b": 32}


def test_threads_that_read_hold_a_bounded_number_of_pieces() -> None:
    store = MemoryStore(BLOCK)
    first = Engine(store)
    for number in range(3):
        first.answer(f"{number}", prompt(number))
    first.core.close()
    second = Engine(store, num_blocks=64)
    second.arrivals._pieces = Queue(10)
    second.arrivals._clock = time.monotonic
    second.now = time.monotonic()
    second.arrivals._least = 60.0
    second.arrivals._executor = executor = ThreadPoolExecutor(2)
    for number in range(3):
        assert second.add(f"{number}", prompt(number))
    deadline = time.monotonic() + 60
    while second.arrivals._pieces.qsize() < 10 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert store.counts.read_bytes <= (10 + 2) * BLOCK
    second.run()
    executor.shutdown()
    assert fetched(second) == {("disk", "hit"): 96}


def test_blocks_that_were_not_filled_end_the_engine() -> None:
    store = kept_prompt()
    second = Engine(store)
    failed = Future[None]()
    failed.set_exception(MemoryError("of the device"))
    second.backend.write_blocks = lambda *_: failed  # type: ignore[method-assign]
    second.add("a", prompt(0))
    with pytest.raises(MemoryError, match="of the device"):
        second.run()


def test_an_engine_with_a_port_alone_holds_no_request_that_names_no_source() -> None:
    owner, engine = Engine(), Engine()
    owner.answer("a", prompt(0))
    connect(engine, owner)
    assert not engine.add("a", prompt(0)) and engine.add("b", prompt(0), source=SOURCE)


def test_a_request_that_all_have_left_stops_its_fetch() -> None:
    store = kept_prompt()
    executor = Inline(waits=True)
    second = Engine(store, executor=executor)
    assert second.add("a", prompt(0))
    second.abort("a")
    executor.run()
    assert store.counts.read_bytes == 0 and not second.arrivals
    assert second.add("b", prompt(0))
    second.arrivals.close()
    assert not second.arrivals and not executor.queue


def test_no_more_is_fetched_than_the_pool_has_room_for() -> None:
    store = kept_prompt()
    second = Engine(store, num_blocks=12)
    second.add("busy", prompt(1, 20), 8)
    second.step()
    second.answer("a", prompt(0))
    assert fetched(second)["disk", "hit"] <= 28


def test_what_computes_faster_is_not_fetched() -> None:
    store = kept_prompt()
    assert not Engine(store, computing=1e-9).add("a", prompt(0))
    link = Link()
    assert link.is_worth(100, 1.0) and not link.is_worth(100, 0.02)
    # a tenth of it with the first piece: 1e9 bytes a second behind that
    link.observe(10**8, 0.12, 10**9, 1.02)
    assert link.bytes_per_s == pytest.approx(5.5e8)
    for _ in range(20):
        link.observe(10**8, 0.42, 10**9, 1.32)
    assert link.seconds(10**9) == pytest.approx(1.32, rel=0.01), "as long as it took"
    for _ in range(5):
        link.observe(0, 5.0, 0, 5.0)
    assert not link.is_worth(100, 1.0)
    refusals = 0
    while not link.is_worth(100, 1.0):
        refusals += 1
    assert 10 < refusals < 100, "a place that stood still is tried again"
