"""Requests by class, and requests that wait for an adapter first and for blocks then."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from paceline.core.sampling_params import SamplingParams
from paceline.core.slo import Slo
from paceline.engine.adapters.interface import AdapterLimits
from paceline.engine.adapters.store import AdapterStore
from paceline.engine.blocks.store import MemoryStore
from paceline.engine.process.loop import EngineLoop, take_census
from paceline.engine.process.messages import (
    Abort,
    Add,
    ClientMessage,
    EngineMessage,
    LoadAdapter,
    Outputs,
    Shutdown,
    UnloadAdapter,
)
from paceline.engine.types import ClassUse, GenerationRequest
from tests.driving import Driver, make_request
from tests.engine.adapters.test_store import Backend
from tests.engine.blocks.rig import Engine, Inline


def test_who_runs_and_who_waits_by_class_and_their_blocks() -> None:
    driver = Driver(block_size=4, max_num_seqs=3)
    assert take_census(driver.scheduler.requests) == ()
    chat, batch = Slo(slo_class="chat"), Slo(slo_class="batch")
    driver.add(
        make_request("a", 9, slo=chat),
        make_request("b", 3, slo=batch),
        make_request("c", 5, slo=chat),
        make_request("d", 5, slo=chat, arrival=1.0),
    )
    driver.step()
    assert take_census(driver.scheduler.requests) == (
        ClassUse("batch", 1, 0, 1),
        ClassUse("chat", 2, 1, 5),
    )
    driver.run()
    assert take_census(driver.scheduler.requests) == ()


class Turns:
    """A loop of a null engine with adapters and a store, driven turn by turn."""

    def __init__(self, store: MemoryStore) -> None:
        self.messages: list[ClientMessage] = []
        self.sent: list[EngineMessage] = []
        self.executor = Inline(waits=True)
        self.engine = Engine(store, executor=self.executor)
        self.adapters = self.engine.core.adapters = AdapterStore(Backend(), AdapterLimits(30))
        self.loop = EngineLoop(
            self.engine.core, self, self.sent.append, arrivals=self.engine.arrivals
        )

    def receive(self, timeout: float) -> Sequence[ClientMessage]:
        received, self.messages = self.messages, []
        return received

    def turn(self, *messages: ClientMessage) -> None:
        self.messages += messages
        self.loop._take()
        if self.engine.core.has_work:
            self.loop._step()

    def add(self, name: str, adapter: str | None) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=4)
        self.turn(
            Add(
                GenerationRequest(
                    request_id=name, prompt_token_ids=[*range(33)], sampling=sampling,
                    arrival_time=0.0, adapter=adapter,
                )
            )
        )  # fmt: skip

    def until_it_waits_for_blocks(self) -> None:
        for _ in range(20_000):
            self.turn()
            if self.engine.arrivals:
                return
            time.sleep(0.001)
        raise AssertionError("it does not wait for blocks")

    def ends(self) -> dict[str, str]:
        updates = [u for each in self.sent if isinstance(each, Outputs) for u in each.updates]
        return {u.request_id: u.finish_reason.value for u in updates if u.finish_reason}


def test_a_load_holds_up_no_other_request() -> None:
    turns = Turns(MemoryStore(4 * 8))
    backend = turns.adapters._backend
    assert isinstance(backend, Backend)
    backend.may_open.clear()
    turns.turn(LoadAdapter("a", "a"))
    turns.add("cold", "a")
    for number in range(20):
        turns.add(f"r{number}", None)
        while f"r{number}/0" not in turns.ends():
            turns.turn()
    assert "cold/0" not in turns.ends()
    backend.may_open.set()
    while "cold/0" not in turns.ends():
        turns.turn()
        time.sleep(0.001)
    turns.engine.core.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_an_adapter_stays_while_its_request_waits_for_blocks(leaves: bool) -> None:
    store = MemoryStore(4 * 8)
    before = Turns(store)
    before.turn(LoadAdapter("a", "a"))
    before.add("r", "a")
    while not before.ends():
        before.turn()
    before.engine.core.close()
    assert len(store.blocks) == 8
    turns = Turns(store)
    turns.turn(LoadAdapter("a", "a"))
    turns.add("r", "a")
    turns.until_it_waits_for_blocks()
    # others end meanwhile, of the model itself: none of these blocks are theirs
    turns.add("other", None)
    while "other/0" not in turns.ends():
        turns.turn()
    turns.turn(UnloadAdapter("a"))
    assert turns.engine.arrivals.request_ids == ("r",)
    assert turns.adapters.use_of("r") is not None
    if leaves:
        turns.turn(Abort(("r/0",)))
        assert not turns.engine.arrivals
    else:
        turns.executor.run()
        while "r/0" not in turns.ends():
            turns.turn()
        assert turns.engine.keeper.fetched == {("disk", "hit"): 32}
    turns.turn()
    turns.loop._flush()
    assert turns.ends()["r/0"] == ("abort" if leaves else "length")
    assert not turns.adapters.has_leases
    turns.engine.core.close()


def test_an_engine_that_ends_stops_its_fetches() -> None:
    store = MemoryStore(4 * 8)
    before = Engine(store)
    before.answer("r", [*range(33)])
    before.core.close()
    for end in (Shutdown(), None):
        turns = Turns(store)
        turns.add("r", None)
        assert turns.engine.arrivals
        if end is not None:
            turns.messages = [end]
            assert turns.loop.run() == end
        else:
            turns.receive = None  # type: ignore[assignment, method-assign]
            with pytest.raises(TypeError):
                turns.loop.run()
        assert not turns.engine.arrivals and not turns.executor.queue
        turns.engine.core.close()
