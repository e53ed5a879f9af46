"""Two engines of the null backend, driven by hand, and what they fetch from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from queue import Queue
from typing import Any

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.outputs import RequestUpdate
from paceline.core.sampling_params import SamplingParams
from paceline.engine.blocks.keeper import Asked, BlockKeeper
from paceline.engine.blocks.store import BlockSource, BlockStore
from paceline.engine.fanout import add_to_core
from paceline.engine.process.arrivals import Arrivals
from paceline.engine.testing import null_core
from paceline.engine.types import GenerationRequest, KvSource, Resume, ResumedChoice

VOCAB = 101
PRINT = bytes(32)
SOURCE = KvSource(url="tcp://10.0.0.1:5700", fingerprint=PRINT.hex())


class Inline(Executor):
    """Runs work at once, or when told."""

    def __init__(self, *, waits: bool = False) -> None:
        self.waits = waits
        self.queue: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.queue.append(lambda: fn(*args, **kwargs))
        if not self.waits:
            self.run()
        return Future()

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.queue.clear()


class Engine:
    """An engine and the requests that it serves."""

    def __init__(
        self,
        store: BlockStore | None = None,
        *,
        executor: Inline | None = None,
        computing: float = math.inf,
        num_blocks: int = 32,
        **backend: Any,
    ) -> None:
        self.now = 0.0
        self.backend = NullBackend(vocab_size=VOCAB, block_size=4, num_blocks=num_blocks, **backend)

        def keeper(kv: KVCacheManager) -> BlockKeeper:
            return BlockKeeper(kv, self.backend, PRINT, store)

        self.core = null_core(self.backend, blocks=keeper, max_num_batched_tokens=256)
        assert self.core.blocks is not None
        self.keeper = self.core.blocks
        self.executor = executor or Inline()
        self.arrivals = Arrivals(
            self.keeper,
            lambda tokens: computing * tokens,
            self.core.adapter_of,
            executor=self.executor,
            clock=lambda: self.now,
        )
        # what reads runs on this thread, which lands only later
        self.arrivals._pieces = Queue()
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        count: int = 4,
        *,
        behind: Sequence[int] = (),
        source: KvSource | None = None,
        **fields: Any,
    ) -> bool:
        """Send a request; whether it was held."""
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=count),
            arrival_time=self.now,
            resume=Resume(choices=(ResumedChoice(token_ids=tuple(behind)),)) if behind else None,
            kv_source=source,
            **fields,
        )
        self.tokens[name] = list(behind)
        held = self.arrivals.hold(request, self.now)
        if not held:
            add_to_core(self.core, request)
        return held

    def abort(self, name: str) -> None:
        self._note((*self.arrivals.abort([f"{name}/0"]), *self.core.abort([f"{name}/0"])))

    def step(self) -> None:
        """Do what a turn of ``EngineLoop`` does."""
        self.keeper.poll(self.core.num_steps, self.core.num_planned)
        for request, _ in self.arrivals.take(self.now):
            add_to_core(self.core, request)
        self._note(self.core.step())

    def run(self) -> None:
        while self.core.has_work or self.arrivals or self.keeper.is_busy:
            self.step()
        self.core.check_integrity()

    def answer(self, name: str, prompt: Sequence[int], count: int = 4, **more: Any) -> list[int]:
        """Run a request to its end and return its output, checked against arithmetic."""
        self.add(name, prompt, count, **more)
        self.run()
        assert self.tokens[name] == expected_tokens(prompt, count, VOCAB), name
        return self.tokens[name]

    def _note(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            name = update.request_id.rpartition("/")[0]
            self.tokens[name] += update.new_token_ids
            self.cached[name] = update.num_cached_tokens
            if update.finish_reason is not None:
                self.ended[name] = update.finish_reason.value


class Lossy:
    """A peer's blocks over a link with faults, as ``peer.Peer`` would bring them.

    Args:
        faults: what happens to each ask: "" nothing, "lost" OSError before the first block, "late"
            TimeoutError after one, "half" one block, "evicted": the peer has none any more.
    """

    def __init__(self, owner: Engine, faults: Iterator[str]) -> None:
        self.owner, self._faults = owner, faults

    def read(self, hashes: Sequence[bytes], left: Callable[[], float]) -> Iterator[bytes]:
        fault = next(self._faults, "")
        if fault == "lost":
            raise ConnectionError("the link is down")
        answers: list[bytes] = []
        self.owner.keeper.ask(Asked(hashes, answers.append))
        while not answers:
            if self.owner.core.has_work:
                self.owner.step()
            else:
                keeper, core = self.owner.keeper, self.owner.core
                keeper.poll(core.num_steps, core.num_planned)
        size = self.owner.keeper.block_bytes
        data = b"" if fault == "evicted" else answers[0]
        for first in range(0, len(data), size):
            yield data[first : first + size]
            if fault == "late":
                raise TimeoutError("it stood still")
            if fault == "half":
                return


def connect(engine: Engine, owner: Engine, faults: Iterable[str] = ()) -> None:
    """Let ``engine`` fetch from ``owner``."""
    source: BlockSource = Lossy(owner, iter(faults))
    engine.keeper.peer = lambda wanted: source if wanted == SOURCE else None
