"""An ``EngineClient`` of a model that is loaded and unloaded: one for its whole life, over a
supervised engine for each load. Statistics add up over loads; ``info`` and ``tokenizer`` stay.

It does not know when a load is due: requests reach it with a lease (``pool``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from msgspec.structs import replace

from paceline.engine.protocol import AdapterClient, EngineClient, Sink, Tokenizer
from paceline.engine.supervision.supervised import KnownAdapter, added, for_the_next
from paceline.engine.types import (
    AdapterStatus,
    EngineFaults,
    EngineInfo,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
)
from paceline.errors import EngineDeadError

__all__ = ["LoadableClient", "Start"]


# starts a model's engine; the tokenizer is that of an earlier load, if there was one
Start = Callable[[Tokenizer | None], Awaitable[EngineClient]]


class LoadableClient:
    """Made with the first load's engine."""

    on_dead: Callable[[EngineDeadError], None] | None = None
    on_stats: Callable[[EngineStats], None] | None = None
    on_timeline: Callable[[bytes | None], None] | None = None

    def __init__(self, engine: EngineClient) -> None:
        self._engine: EngineClient | None = None
        self._info, self._tokenizer = engine.info, engine.tokenizer
        # sum over all loads that ended
        self._before: EngineStats | None = None
        self._lost = EngineFaults()
        self._stats = engine.stats
        # adapters by key: every engine gets them
        self._adapters: dict[str, KnownAdapter] = {}
        self.adopt(engine)

    def adopt(self, engine: EngineClient) -> None:
        """Serve with the engine of another load."""
        self._engine, self._info = engine, engine.info
        engine.on_stats = self._note_stats
        engine.on_timeline = self._note_timeline
        engine.on_dead = self._note_end
        if isinstance(engine, AdapterClient):
            for key, known in for_the_next(self._adapters, {}).items():
                engine.register_adapter(key, known.path, known.digest, pinned=known.pinned)
        self._note_stats(engine.stats)

    async def unload(self) -> None:
        """End the engine; no request runs."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._lost = _sum(self._lost, engine.faults)
        if isinstance(engine, AdapterClient):
            self._adapters = for_the_next(self._adapters, engine.adapters)
        engine.on_stats = engine.on_timeline = engine.on_dead = None
        await engine.close()
        self._before = self._stats
        self._note_stats(EngineStats.at_rest(self._info))
        self._note_timeline(None)

    @property
    def engine(self) -> EngineClient | None:
        """The engine of the present load; None: the model is not in memory."""
        return self._engine

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def faults(self) -> EngineFaults:
        if self._engine is None:
            return self._lost
        return _sum(self._lost, self._engine.faults)

    def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncIterator[GenerationOutput]:
        """Implement ``EngineClient.generate``; the caller has a lease."""
        return self._present.generate(request, sink)

    async def abort(self, request_id: str) -> None:
        if self._engine is not None:
            await self._engine.abort(request_id)

    @property
    def adapters(self) -> Mapping[str, AdapterStatus]:
        """Latest news of each adapter."""
        news = {
            key: AdapterStatus(key, "registered", digest=known.digest)
            for key, known in self._adapters.items()
        }
        return news if (engine := self._with_adapters) is None else news | dict(engine.adapters)

    @property
    def _with_adapters(self) -> AdapterClient | None:
        engine: object = self._engine
        return engine if isinstance(engine, AdapterClient) else None

    async def load_adapter(self, key: str, path: str, *, pinned: bool = False) -> AdapterStatus:
        """Load an adapter as ``AdapterClient.load_adapter`` does; later engines get it too. While
        the model is not in memory it is ``registered``, and loaded with the model."""
        status = AdapterStatus(key, "registered")
        if (engine := self._with_adapters) is not None:
            status = await engine.load_adapter(key, path, pinned=pinned)
        if status.status != "failed":
            self.register_adapter(key, path, status.digest, pinned=pinned)
        return status

    def register_adapter(
        self, key: str, path: str, digest: str = "", *, pinned: bool = False
    ) -> None:
        """Have later engines load an adapter."""
        self._adapters[key] = KnownAdapter(path, digest, pinned)

    def unload_adapter(self, key: str) -> None:
        self._adapters.pop(key, None)
        if (engine := self._with_adapters) is not None:
            engine.unload_adapter(key)

    def check_health(self) -> None:
        if self._engine is not None:
            self._engine.check_health()

    async def drain(self, timeout: float) -> None:
        if self._engine is not None:
            await self._engine.drain(timeout)

    async def close(self) -> None:
        await self.unload()

    @property
    def _present(self) -> EngineClient:
        if self._engine is None:
            raise EngineDeadError(f"the model {self._info.model} is not in memory")
        return self._engine

    def _note_stats(self, stats: EngineStats) -> None:
        self._stats = stats if self._before is None else added(self._before, stats)
        if self.on_stats is not None:
            self.on_stats(self._stats)

    def _note_timeline(self, frames: bytes | None) -> None:
        if self.on_timeline is not None:
            self.on_timeline(frames)

    def _note_end(self, error: EngineDeadError) -> None:
        if self.on_dead is not None:
            self.on_dead(error)


def _sum(before: EngineFaults, now: EngineFaults) -> EngineFaults:
    losses = dict(before.losses)
    for kind, count in now.losses:
        losses[kind] = losses.get(kind, 0) + count
    return replace(
        now,
        losses=tuple(sorted(losses.items())),
        num_resent=before.num_resent + now.num_resent,
        num_lost=before.num_lost + now.num_lost,
        num_poisoned=before.num_poisoned + now.num_poisoned,
    )
