"""A server's files and batches: opened when first needed, off the event loop.

This module does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from paceline.errors import ConfigError
from paceline.http.errors import HttpError
from paceline.server.batches.runner import BatchRunner
from paceline.server.batches.store import BatchStore
from paceline.server.generation.service import Service
from paceline.server.settings.config import BatchConfig

__all__ = ["Batches"]

_log = logging.getLogger("paceline.server")

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Batches:
    """Files and batches of one server. Bound to the event loop of its first use.

    Args:
        config: None: nothing is kept, and every request gets 501.
        clock: unix time in seconds.
    """

    def __init__(
        self, service: Service, config: BatchConfig | None, clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.clock = clock
        self._service = service
        self._store: BatchStore | None = None
        self._runner: BatchRunner | None = None
        # the only thread that uses the store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-store")
        self._opening = asyncio.Lock()
        self._stopped = False
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Continue what an earlier server left unfinished.

        Raises:
            ConfigError: the folder cannot be used, and ``required`` is set.
        """
        config = self.config
        if config is None or not (config.required or os.path.exists(config.folder)):
            return
        try:
            await self._open(config)
        except ConfigError as error:
            if config.required:
                raise
            _log.warning("no_batches reason=%r", str(error))

    async def stop(self) -> None:
        """Stop running lines, which the next server repeats, and serve nothing from here on. Waits
        for the disk; a caller that cannot wait may cancel this and call it again."""
        self._stopped = True
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    def hurry(self) -> None:
        """Abort the running database operation; the next server repeats it."""
        if self._store is not None:
            self._store.interrupt()

    async def _stop(self) -> None:
        async with self._opening:
            if self._runner is not None:
                await self._runner.stop()
            if self._store is not None:
                await self._on_thread(self._store.close)
                self._store = None
        self._thread.shutdown(wait=False)

    @property
    def settings(self) -> BatchConfig:
        """Return the settings. Raises HttpError 501 without a folder."""
        if self.config is None:
            raise HttpError(501, "this server keeps no files and batches; see --batch-dir")
        return self.config

    async def runner(self) -> BatchRunner:
        """Return the runner. Raises HttpError 503 if the folder is unusable; like ``settings``."""
        config = self.settings
        if self._runner is None:
            try:
                await self._open(config)
            except ConfigError as error:
                _log.warning("no_batches reason=%r", str(error))
                raise HttpError(
                    503, "files and batches cannot be kept for now; the server's log says why"
                ) from None
        assert self._runner is not None
        return self._runner

    async def call(
        self,
        method: Callable[Concatenate[BatchStore, _P], _R],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        """Run a method of the store on its thread. Raises its errors, and like ``runner``."""
        await self.runner()
        return await self._call(method, *args, **kwargs)

    async def _call(
        self,
        method: Callable[Concatenate[BatchStore, _P], _R],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        if self._store is None:
            raise HttpError(503, "the server is shutting down")
        return await self._on_thread(partial(method, self._store, *args, **kwargs))

    async def _on_thread(self, work: Callable[[], _R]) -> _R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _open(self, config: BatchConfig) -> None:
        async with self._opening:
            if self._runner is not None:
                return
            if self._stopped:
                raise HttpError(503, "the server is shutting down")
            service = self._service
            open_store = partial(BatchStore, config.folder, config.max_bytes)
            self._store = await self._on_thread(open_store)
            self._runner = BatchRunner(
                service,
                self._call,
                concurrency=config.concurrency or max(1, service.client.info.max_num_seqs // 2),
                max_requests=config.max_requests,
                max_line_bytes=service.config.max_body_bytes,
                clock=self.clock,
            )
            self._runner.start()
