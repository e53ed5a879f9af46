"""The engine's thread between the KV pool and where its blocks also lie: saves, lands, answers.

Blocks are copied by the backend between the plans that were passed before and those that follow
(``core.backend.BlockMemory``). So a copy that is ordered before a plan holds what the bookkeeping
said at that moment, and none races with a step.

Registered is not yet computed: a block is found from the moment its step is planned. A copy of it
is ordered behind that step, and is given away once the step's result is known and the block was not
forgotten for it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Final, NamedTuple, Protocol

from paceline.core.backend import BlockMemory
from paceline.core.memory.block_pool import Losses
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.engine.blocks.store import BlockSource, BlockStore
from paceline.engine.types import BlockStats, KvSource

__all__ = ["Asked", "BlockKeeper"]

_log = logging.getLogger(__name__)

# bytes that wait to be written at most; more are not kept
_MOST_WAITING: Final = 64 << 20
# bytes that one idle moment saves, so that a request that arrives then waits for milliseconds
_IDLE_BYTES: Final = 16 << 20
# bytes of one answer to a peer, copied at once
_ANSWER_BYTES: Final = 64 << 20
# answers that wait for their steps to end; other questions wait
_MOST_COPIES: Final = 2
# seconds for the last blocks at the end; the process is killed soon after (``process.client``)
_CLOSING_S: Final = 4.0


class Server(Protocol):
    """A listener for peers, see ``peer.BlockServer``."""

    @property
    def port(self) -> int: ...
    def close(self) -> None: ...


class Asked(NamedTuple):
    """A peer's question for a run of blocks."""

    hashes: Sequence[bytes]
    # gets the content of the blocks from the first on that are here, maybe of none
    reply: Callable[[bytes], None]
    # time.monotonic() after which no answer is wanted
    until: float = math.inf


class _Copy(NamedTuple):
    """A copy for a peer, until its blocks can be trusted."""

    hashes: Sequence[bytes]
    block_ids: Sequence[int]
    data: Future[bytes]
    # steps that must have ended
    steps: int
    reply: Callable[[bytes], None]


class BlockKeeper:
    """Used from the engine's thread, except ``ask``, which any thread calls.

    Args:
        memory: the backend; its ``block_layout`` is not None.
        fingerprint: of everything that blocks depend on.
        store: owned from here on; None: nothing is kept outside the pool.
    """

    def __init__(
        self, kv: KVCacheManager, memory: BlockMemory, fingerprint: bytes, store: BlockStore | None
    ) -> None:
        layout = memory.block_layout()
        assert layout is not None and kv.windows is None, "blocks that cannot be copied"
        self.block_bytes = layout[0]
        self.kv, self.fingerprint, self.store = kv, fingerprint, store
        self._memory = memory
        # called by ``ask``, from any thread: makes the engine's thread call ``poll`` soon
        self.wake: Callable[[], None] = lambda: None
        # makes the place that a request names; None: it must not be asked
        self.peer: Callable[[KvSource], BlockSource | None] = lambda _: None
        # answers peers, owned from here on; None: none is served
        self.server: Server | None = None
        self._asked: deque[Asked] = deque()
        self._copies: deque[_Copy] = deque()
        # of blocks that came from outside
        self._landings: deque[Future[None]] = deque()
        self._sent_tokens = 0
        self._writer: ThreadPoolExecutor | None = None
        self._losses = Losses()
        if store is not None:
            kv.pool.losses = self._losses
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-store")
        # hashes of copies on their way to the store, and whether everything findable is there
        self._saving: set[bytes] = set()
        self._lock = threading.Lock()
        self._settled_at = -1
        # tokens by (source, result), see ``BlockStats.fetched``; counted by ``Arrivals``
        self.fetched: dict[tuple[str, str], int] = {}

    # ------------------------------------------------------------------ pool -> store

    def save_evicted(self) -> None:
        """Save what the pool has evicted since the last call, ahead of the plan that overwrites it,
        and forget what is not to be trusted."""
        losses = self._losses
        self._forget()
        if losses.evicted:
            self._save(losses.evicted)
            losses.evicted.clear()

    def save_idle(self, num_steps: int) -> None:
        """Save some of the blocks that no request uses; called while there is nothing to do."""
        if self.store is None or self._settled_at == num_steps or self._saving:
            return
        most, batch = max(1, _IDLE_BYTES // self.block_bytes), []
        for pair in self.kv.pool.findable():
            if not self.store.find((pair[1],)):
                batch.append(pair)
                if len(batch) == most:
                    break
        if batch and not self.store.counts.failure:
            self._save(batch)
        else:
            self._settled_at = num_steps

    def _save(self, pairs: Sequence[tuple[int, bytes]]) -> Future[bytes] | None:
        """Order copies of blocks for the store, of those that it has not."""
        store = self.store
        assert store is not None and self._writer is not None, "there is nowhere to save to"
        if store.counts.failure:
            return None
        with self._lock:
            new = [(b, h) for b, h in pairs if h not in self._saving and not store.find((h,))]
            room = max(0, _MOST_WAITING // self.block_bytes - len(self._saving))
            if len(new) > room:
                store.counts.errors["busy"] += len(new) - room
                del new[room:]
            self._saving.update(block_hash for _, block_hash in new)
        if not new:
            return None
        hashes = [block_hash for _, block_hash in new]
        data = self._memory.read_blocks([block_id for block_id, _ in new])
        data.add_done_callback(lambda done: self._pass_on(hashes, done))
        return data

    def _pass_on(self, hashes: list[bytes], data: Future[bytes]) -> None:
        """Give a finished copy to the writer; called on the backend's thread."""
        writer = self._writer
        if data.cancelled() or data.exception() is not None or writer is None:
            with self._lock:
                self._saving.difference_update(hashes)
            return
        writer.submit(self._write, hashes, data.result())

    def _write(self, hashes: list[bytes], data: bytes) -> None:
        assert self.store is not None
        try:
            with self._lock:
                # some may have been forgotten meanwhile
                kept = [i for i, each in enumerate(hashes) if each in self._saving]
            size = self.block_bytes
            if len(kept) < len(hashes):
                data = b"".join(data[i * size : (i + 1) * size] for i in kept)
            self.store.write([hashes[i] for i in kept], data)
        except Exception:
            # what is not kept is computed again
            _log.exception("kv_store_write blocks=%d", len(hashes))
        finally:
            with self._lock:
                self._saving.difference_update(hashes)

    def _forget(self) -> None:
        """Have the store drop what is not to be trusted."""
        if not self._losses.forgotten:
            return
        assert self.store is not None and self._writer is not None, "losses are read for a store"
        hashes = tuple(self._losses.forgotten)
        self._losses.forgotten.clear()
        with self._lock:
            self._saving.difference_update(hashes)
        # behind the write that may be under way
        self._writer.submit(self.store.drop, hashes)

    # ------------------------------------------------------------------ outside -> pool

    def num_here(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the hashes, from the first on, the pool can find."""
        lookup = self.kv.pool.lookup
        return next((i for i, each in enumerate(hashes) if lookup(each) is None), len(hashes))

    def room_for(self, count: int) -> int:
        """Return how many of ``count`` blocks from outside would stay for the next request."""
        pool = self.kv.pool
        return min(count, pool.num_free, pool.max_idle)

    def land(self, hashes: Sequence[bytes], first: int, pieces: Iterable[bytes]) -> int:
        """Put the content of ``hashes[first:]`` into the pool, as far as it has room, and return
        the number of blocks that it took. A call takes time in proportion to all of ``hashes``."""
        block_ids = self.kv.land(hashes, first)
        if self.store is not None:
            # the blocks taken may have held other prefixes
            self.save_evicted()
        num_landed = 0
        for data in pieces:
            ids = block_ids[num_landed : num_landed + len(data) // self.block_bytes]
            if ids:
                content = data[: len(ids) * self.block_bytes]
                self._landings.append(self._memory.write_blocks(ids, content))
            num_landed += len(ids)
        return num_landed

    def note(self, source: str, result: str, num_blocks: int) -> None:
        """Count blocks that were wanted from a source."""
        if num_blocks:
            key, tokens = (source, result), num_blocks * self.kv.block_size
            self.fetched[key] = self.fetched.get(key, 0) + tokens

    # ------------------------------------------------------------------ pool -> peer

    def ask(self, asked: Asked) -> None:
        """Queue a peer's question. Called from any thread; ``reply`` is called on the engine's."""
        self._asked.append(asked)
        self.wake()

    @property
    def port(self) -> int:
        """The port at which peers ask; 0: there is none."""
        return 0 if self.server is None else self.server.port

    @property
    def is_busy(self) -> bool:
        """Whether peers wait for an answer."""
        return bool(self._asked or self._copies)

    def poll(self, num_done: int, num_planned: int) -> None:
        """Answer peers: order copies of what they ask for, behind the steps planned so far, and
        send those whose steps have ended.

        Raises:
            Exception: blocks that can be found were not filled; the engine cannot go on.
        """
        while self._landings and self._landings[0].done():
            self._landings.popleft().result()
        self._forget()
        while self._asked and len(self._copies) < _MOST_COPIES:
            asked = self._asked.popleft()
            if asked.until < time.monotonic():
                continue
            most = max(1, _ANSWER_BYTES // self.block_bytes)
            hashes = asked.hashes[: min(most, self.num_here(asked.hashes))]
            found = [self.kv.pool.lookup(each) for each in hashes]
            block_ids = [block_id for block_id in found if block_id is not None]
            if not block_ids:
                asked.reply(b"")
                continue
            data = self._memory.read_blocks(block_ids)
            self._copies.append(_Copy(hashes, block_ids, data, num_planned, asked.reply))
        while self._copies and self._copies[0].data.done() and self._copies[0].steps <= num_done:
            self._answer(self._copies.popleft())

    def _answer(self, copy: _Copy) -> None:
        count = 0
        if copy.data.exception() is None:
            lookup = self.kv.pool.lookup
            for block_hash, block_id in zip(copy.hashes, copy.block_ids, strict=True):
                if lookup(block_hash) != block_id:
                    # forgotten, or evicted, which looks alike
                    break
                count += 1
        self._sent_tokens += count * self.kv.block_size
        copy.reply(copy.data.result()[: count * self.block_bytes] if count else b"")

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Save what can still be found, latest used first, for a few seconds; then close the store.
        Called before the backend is closed, when nothing runs any more. Idempotent."""
        if self.server is not None:
            self.server.close()
        if self.store is None or self._writer is None:
            return
        until = time.monotonic() + _CLOSING_S
        self._forget()
        wait_for([self._writer.submit(lambda: None)], _CLOSING_S)
        count = max(1, _IDLE_BYTES // self.block_bytes)
        pairs = [pair for pair in self.kv.pool.findable() if not self.store.find((pair[1],))]
        for first in range(0, len(pairs), count):
            copied = self._save(pairs[first : first + count])
            if copied is not None:
                wait_for([copied], max(0.0, until - time.monotonic()))
            barrier = self._writer.submit(lambda: None)
            wait_for([barrier], max(0.0, until - time.monotonic()))
            if time.monotonic() >= until:
                _log.warning("kv_store_late saved=%d of=%d blocks", first, len(pairs))
                break
        writer, self._writer = self._writer, None
        writer.shutdown(wait=time.monotonic() < until, cancel_futures=True)
        self.store.close()

    def stats(self) -> BlockStats:
        """Return a snapshot."""
        fetched = tuple((*key, tokens) for key, tokens in self.fetched.items())
        if self.store is None:
            return BlockStats(fetched=fetched, sent_tokens=self._sent_tokens)
        counts = self.store.counts
        return BlockStats(
            fetched=fetched,
            sent_tokens=self._sent_tokens,
            store_up=not counts.failure,
            store_bytes=counts.num_bytes,
            read_bytes=counts.read_bytes,
            written_bytes=counts.written_bytes,
            errors=tuple(counts.errors.items()),
        )
