"""Two engines, a store and a link with faults, in any order: every token is the right one."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.backends.reference.null import expected_tokens
from paceline.core.memory.kv_cache import hash_prefix
from paceline.engine.blocks.store import MemoryStore
from tests.engine.blocks.rig import SOURCE, VOCAB, Engine, Inline, connect

FAULTS = ("", "lost", "late", "half", "evicted")
COUNT = 9
PROMPTS = [[*range(20), number, *range(length)] for number in range(3) for length in (1, 18)]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(4 * 8)
        self.engines = [
            Engine(store, num_blocks=24, executor=Inline(waits=True), poison_token=VOCAB)
            for store in (self.store, None)
        ]
        # name -> prompt, of requests at an engine
        self.prompts: dict[str, list[int]] = {}
        self.homes: dict[str, int] = {}
        self.fault = ""
        for engine, other in zip(self.engines, reversed(self.engines), strict=True):
            connect(engine, other, self.faults())

    def faults(self) -> Iterator[str]:
        while True:
            yield self.fault

    @rule(prompt=st.sampled_from(PROMPTS), at=st.integers(0, 1), asks=st.booleans())
    def send(self, prompt: list[int], at: int, asks: bool) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name], self.homes[name] = prompt, at
        self.engines[at].add(name, prompt, COUNT, source=SOURCE if asks else None)

    @rule(at=st.integers(0, 1), fault=st.sampled_from(FAULTS))
    def fetch(self, at: int, fault: str) -> None:
        """Let the reading threads of an engine run."""
        self.fault = fault
        self.engines[at].executor.run()

    @rule(at=st.integers(0, 1))
    def step(self, at: int) -> None:
        engine = self.engines[at]
        if engine.core.has_work or engine.arrivals or engine.keeper.is_busy:
            engine.step()

    @rule(at=st.integers(0, 1))
    def wait(self, at: int) -> None:
        """All deadlines pass."""
        self.engines[at].now += 100.0

    @precondition(lambda self: self.homes)
    @rule(data=st.data(), asks=st.booleans())
    def move(self, data: st.DataObject, asks: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.homes)))
        before = self.engines[self.homes[name]]
        made = list(before.tokens[name])
        if before.ended.get(name):
            return
        before.abort(name)
        self.homes[name] = 1 - self.homes[name]
        after = self.engines[self.homes[name]]
        after.ended.pop(name, None)
        source = SOURCE if asks else None
        after.add(name, self.prompts[name], COUNT, behind=made, source=source)

    @precondition(lambda self: self.homes)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.homes)))
        self.engines[self.homes.pop(name)].abort(name)

    @rule()
    def rest(self) -> None:
        engine = self.engines[0]
        engine.keeper.save_idle(engine.core.num_steps)
        assert engine.keeper._writer is not None
        engine.keeper._writer.submit(lambda: None).result(30)

    @rule(prompt=st.sampled_from(PROMPTS), place=st.integers(0, 4))
    def spoil(self, prompt: list[int], place: int) -> None:
        """A block on disk fails its checksum."""
        self.store.broken.add(hash_prefix(prompt, 4)[place])

    @invariant()
    def all_is_right(self) -> None:
        for engine in self.engines:
            engine.core.check_integrity()
        for name, at in self.homes.items():
            found = self.engines[at].tokens[name]
            assert found == expected_tokens(self.prompts[name], COUNT, VOCAB)[: len(found)], name

    def teardown(self) -> None:
        for engine in self.engines:
            engine.executor.waits = False
            engine.executor.run()
            engine.now += 100.0
        for engine in self.engines:
            engine.run()
        for name, at in self.homes.items():
            assert len(self.engines[at].tokens[name]) == COUNT, f"{name} was lost"
        for engine in self.engines:
            engine.core.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
