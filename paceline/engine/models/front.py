"""A pool as an ``EngineClient``: what the server's own routes see of its several models.

Descriptions and statistics are the first model's, health and the end are all models'.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from paceline.engine.models.client import LoadableClient
from paceline.engine.models.pool import ModelPool
from paceline.engine.protocol import Sink, Tokenizer
from paceline.engine.types import (
    EngineFaults,
    EngineInfo,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
)
from paceline.errors import EngineDeadError

__all__ = ["FrontClient"]


class FrontClient:
    """The client that answers for all models of a pool. There is one from the first load on."""

    # never called: when one model's engine ends, the other models and the server go on
    on_dead: Callable[[EngineDeadError], None] | None = None

    def __init__(self, pool: ModelPool, first: str) -> None:
        self._pool, self._name = pool, first
        self._first: LoadableClient = pool.clients[first]

    @property
    def on_stats(self) -> Callable[[EngineStats], None] | None:
        return self._first.on_stats

    @on_stats.setter
    def on_stats(self, listener: Callable[[EngineStats], None] | None) -> None:
        self._first.on_stats = listener

    @property
    def on_timeline(self) -> Callable[[bytes | None], None] | None:
        return self._first.on_timeline

    @on_timeline.setter
    def on_timeline(self, listener: Callable[[bytes | None], None] | None) -> None:
        self._first.on_timeline = listener

    @property
    def info(self) -> EngineInfo:
        return self._first.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._first.tokenizer

    @property
    def stats(self) -> EngineStats:
        return self._first.stats

    @property
    def faults(self) -> EngineFaults:
        return self._first.faults

    async def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Yield the first model's deltas, with a lease."""
        async with self._pool.lease(self._name) as client:
            outputs = client.generate(request, sink)
            assert isinstance(outputs, AsyncGenerator), "engines yield from generators"
            async with aclosing(outputs):
                async for output in outputs:
                    yield output

    async def abort(self, request_id: str) -> None:
        await self._first.abort(request_id)

    def check_health(self) -> None:
        """Accept any state: a request for a model that is not in memory loads it."""

    async def drain(self, timeout: float) -> None:
        await self._pool.drain(timeout)

    async def close(self) -> None:
        await self._pool.close()
