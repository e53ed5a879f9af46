"""Requests that wait for KV blocks from outside, before they join the queue.

They hold up no other request: each joins the queue, with its own arrival time, once the blocks of
its prompt have come, or have not come in time. What has not come is computed. This module does not
know where blocks come from, or how.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from queue import Full, Queue
from typing import Final, NamedTuple

import msgspec

from paceline.core.memory.kv_cache import hash_prefix
from paceline.core.outputs import RequestUpdate
from paceline.core.request import AdapterUse, FinishReason
from paceline.engine.blocks.keeper import BlockKeeper
from paceline.engine.blocks.link import Link
from paceline.engine.blocks.store import BlockSource
from paceline.engine.fanout import choice_ids, request_of
from paceline.engine.types import GenerationRequest

__all__ = ["Arrivals"]

# a fetch may take this many times as long as predicted, this share of the time to compute instead,
# and at least so many seconds
_LATE: Final = 2.0
_PATIENCE: Final = 0.25
# one that brings its rest sooner than that is computed goes on for this many times as long
_LONGEST: Final = 4.0
_LEAST_S: Final = 0.5
# none takes longer: an engine that only waits looks like one that stands still
_MOST_S: Final = 30.0
# fetches under way at once; others wait, within their own deadlines
_FETCHES: Final = 2
# pieces of all fetches that wait to be landed at most, of 4 MiB (``disk``, ``peer``)
_PIECES: Final = 16
# seconds between looks whether a piece is still wanted
_LOOK_S: Final = 0.1
# peers whose speed is remembered
_LINKS: Final = 64


class _Part(NamedTuple):
    """A run of blocks from one place: ``hashes[first:stop]`` of the fetch."""

    name: str
    source: BlockSource
    link: Link
    first: int
    stop: int


class _Fetch:
    """One fetch, which requests with the same prefix share."""

    def __init__(
        self, hashes: list[bytes], parts: Sequence[_Part], now: float, patience: float
    ) -> None:
        self.hashes, self.parts, self.began = hashes, parts, now
        self.stop = parts[-1].stop
        # the latter for the thread that reads
        self.deadline = now + min(_MOST_S, patience)
        self.limit = now + min(_MOST_S, _LONGEST * patience)
        # with the seconds that each waited for its adapter
        self.requests: list[tuple[GenerationRequest, float]] = []
        # blocks that are in the pool
        self.landed = parts[0].first
        # written by the thread that reads
        self.result, self.ended = "gone", False
        # written by the engine's thread: nothing more is wanted
        self.stopped = False

    @property
    def wanted(self) -> bytes | None:
        """Hash of the next block to land."""
        return None if self.landed == self.stop else self.hashes[self.landed]


class Arrivals:
    """Requests that wait. Used from the engine's thread.

    Args:
        computing: seconds to compute this number of prompt tokens; infinite if unknown.
        adapter_of: a request's adapter, see ``AdapterStore.use_of``.
        executor: runs fetches; None: threads of its own.
        least: seconds that a fetch may take in any case.
    """

    def __init__(
        self,
        keeper: BlockKeeper,
        computing: Callable[[int], float],
        adapter_of: Callable[[str], AdapterUse | None],
        *,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        least: float = _LEAST_S,
    ) -> None:
        self._keeper, self._adapter_of = keeper, adapter_of
        self._computing, self._clock, self._least = computing, clock, least
        self._executor = executor or ThreadPoolExecutor(_FETCHES, thread_name_prefix="kv-fetch")
        self._fetches: list[_Fetch] = []
        self._pieces: Queue[tuple[_Fetch, str, bytes]] = Queue(_PIECES)
        self._links: dict[str, Link] = {}

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return sum(len(fetch.requests) for fetch in self._fetches)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of requests that wait."""
        return tuple(request.request_id for fetch in self._fetches for request, _ in fetch.requests)

    def hold(self, request: GenerationRequest, now: float, adapter_wait: float = 0.0) -> bool:
        """Keep a request for which blocks are worth fetching; return False if none are."""
        keeper = self._keeper
        if keeper.store is None and request.kv_source is None:
            return False
        if request.sampling.prompt_logprobs is not None:
            # such a prompt shares nothing
            return False
        tokens, resume = request.prompt_token_ids, request.resume
        if resume is not None and len(resume.choices) == 1:
            tokens = [*tokens, *resume.choices[0].token_ids]
        adapter = self._adapter_of(request.request_id) if request.adapter is not None else None
        hashes = hash_prefix(tokens, keeper.kv.block_size, request.cache_salt, adapter)
        first = keeper.num_here(hashes)
        stop = first + keeper.room_for(len(hashes) - first)
        if first == stop:
            return False
        # also one under way that has landed what is here
        fetch = next((f for f in self._fetches if f.wanted == hashes[first]), None)
        if fetch is None:
            parts = self._parts(request, hashes, first, stop)
            if not parts:
                return False
            taken = sum(p.link.seconds((p.stop - p.first) * keeper.block_bytes) for p in parts)
            computing = self._computing((stop - first) * keeper.kv.block_size)
            share = _PATIENCE * computing if math.isfinite(computing) else 0.0
            patience = max(self._least, _LATE * taken, share)
            # what is behind its parts is computed
            fetch = _Fetch(hashes[: parts[-1].stop], parts, now, patience)
            self._fetches.append(fetch)
            self._executor.submit(self._read, fetch)
        fetch.requests.append((request, adapter_wait))
        return True

    def take(self, now: float) -> list[tuple[GenerationRequest, float]]:
        """Land what has come, and return requests whose wait is over, in order of arrival, with the
        seconds that each waited for its adapter."""
        over: list[tuple[GenerationRequest, float]] = []
        # read first: nothing comes after it
        ended = {fetch for fetch in self._fetches if fetch.ended}
        self._land()
        going: list[_Fetch] = []
        for fetch in self._fetches:
            if not (fetch in ended or fetch.stopped) and self._goes_on(fetch, now):
                going.append(fetch)
                continue
            fetch.stopped = True
            result = fetch.result if fetch in ended else "late"
            for part in fetch.parts:
                missing = part.stop - max(part.first, fetch.landed)
                self._keeper.note(part.name, result, max(0, missing))
            over += fetch.requests
        self._fetches = going
        return over

    def _goes_on(self, fetch: _Fetch, now: float) -> bool:
        """Whether to wait for a fetch; at its deadline, by the pace at which it came so far."""
        if now < fetch.deadline:
            return True
        came, left = fetch.landed - fetch.parts[0].first, fetch.stop - fetch.landed
        if not came or now >= fetch.limit:
            return False
        rest = (now - fetch.began) / came * left
        if rest >= self._computing(left * self._keeper.kv.block_size):
            return False
        fetch.deadline = min(fetch.limit, now + rest)
        return True

    def abort(self, sequence_ids: Iterable[str]) -> tuple[RequestUpdate, ...]:
        """End waiting requests with a choice among the ids; return updates of all their choices."""
        names, updates = set(map(request_of, sequence_ids)), list[RequestUpdate]()
        for fetch in self._fetches:
            kept = []
            for request, adapter_wait in fetch.requests:
                if request.request_id not in names:
                    kept.append((request, adapter_wait))
                    continue
                updates += [
                    RequestUpdate(choice, (), None, FinishReason.ABORT, None, 0, 0.0, 0)
                    for choice in choice_ids(request)
                ]
            fetch.requests = kept
            fetch.stopped = fetch.stopped or not kept
        self._fetches = [fetch for fetch in self._fetches if fetch.requests]
        # gives back the memory of pieces that are not wanted
        self._land()
        return tuple(updates)

    def close(self) -> None:
        """Stop all fetches. Idempotent."""
        for fetch in self._fetches:
            fetch.stopped = True
        self._fetches.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _parts(
        self, request: GenerationRequest, hashes: list[bytes], first: int, stop: int
    ) -> list[_Part]:
        """Return where to fetch from: this engine's store, and behind that a peer."""
        keeper, parts = self._keeper, list[_Part]()
        size = keeper.kv.block_size

        def add(name: str, place: str, source: BlockSource, count: int) -> None:
            if place not in self._links and len(self._links) == _LINKS:
                del self._links[next(iter(self._links))]
            link = self._links.setdefault(place, Link())
            computing = self._computing(count * size)
            if count and link.is_worth(count * keeper.block_bytes, computing):
                begin = parts[-1].stop if parts else first
                parts.append(_Part(name, source, link, begin, begin + count))

        if keeper.store is not None:
            add("disk", "disk", keeper.store, keeper.store.find(hashes[first:stop]))
        done = parts[-1].stop if parts else first
        source = None if request.kv_source is None else keeper.peer(request.kv_source)
        if request.kv_source is not None and source is not None:
            add("peer", request.kv_source.url, source, stop - done)
        return parts

    def _land(self) -> None:
        keeper, size = self._keeper, self._keeper.block_bytes
        found: dict[_Fetch, list[tuple[str, bytes]]] = {}
        # no more than was there: a quick disk could go on for long
        for _ in range(self._pieces.qsize()):
            fetch, name, data = self._pieces.get_nowait()
            if not fetch.stopped:
                found.setdefault(fetch, []).append((name, data))
        for fetch, pieces in found.items():
            stop = fetch.landed + sum(len(data) // size for _, data in pieces)
            content = [data for _, data in pieces]
            landed = keeper.land(fetch.hashes[:stop], fetch.landed, content)
            fetch.landed += landed
            # without memory for the rest, that is computed
            fetch.stopped = fetch.landed < stop
            for name, data in pieces:
                count = min(landed, len(data) // size)
                keeper.note(name, "hit", count)
                landed -= count

    def _read(self, fetch: _Fetch) -> None:
        """Read all parts; runs on a thread of the executor."""
        try:
            for part in fetch.parts:
                if fetch.stopped or not self._read_part(fetch, part):
                    return
        finally:
            fetch.ended = True

    def _read_part(self, fetch: _Fetch, part: _Part) -> bool:
        """Read one part; return whether all of it came."""
        began = self._clock()
        head = came = 0
        first = took = 0.0

        def left() -> float:
            return 0.0 if fetch.stopped else fetch.limit - self._clock()

        try:
            for data in part.source.read(fetch.hashes[part.first : part.stop], left):
                took = self._clock() - began
                if not came:
                    head, first = len(data), took
                came += len(data)
                if not self._pass_on(fetch, part.name, data, left):
                    fetch.result = "late"
                    break
        except TimeoutError:
            fetch.result = "late"
        except (OSError, msgspec.MsgspecError):
            fetch.result = "error"
        if came:
            part.link.observe(head, first, came, took)
        elif (took := self._clock() - began) > part.link.latency:
            part.link.observe(0, took, 0, took)
        return came == (part.stop - part.first) * self._keeper.block_bytes

    def _pass_on(self, fetch: _Fetch, name: str, data: bytes, left: Callable[[], float]) -> bool:
        """Hand a piece to the engine's thread; return False where it is not wanted any more."""
        while left() > 0.0:
            try:
                self._pieces.put((fetch, name, data), timeout=_LOOK_S)
            except Full:
                continue
            return True
        return False
