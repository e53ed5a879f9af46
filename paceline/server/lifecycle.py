"""A server's life: bind, serve, drain, end with an exit code that tells the outcome.

::

    SIGTERM / SIGINT   new generation requests and /health get 503, running ones continue for up to
                       drain_timeout seconds, the rest is aborted                    -> 0
    the same again     running ones are aborted at once, batches get two seconds      -> 0
    nothing watches    as after a signal; see ``exit_unwatched``                       -> 0
    engine dies        its requests fail, /health gets 503, answers are sent         -> 1

An engine that the client replaces is not dead: /health gets 503 until the next one is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Final, cast

import uvicorn
from fastapi import APIRouter
from starlette.types import ASGIApp

from paceline.engine.protocol import EngineClient
from paceline.errors import ConfigError, EngineDeadError, EngineLostError, InvalidRequestError
from paceline.http.connections import Connection, allow_open_files
from paceline.http.errors import HttpError
from paceline.http.listening import bind
from paceline.server.app import SeveralModels, batches_of, create_app, service_of
from paceline.server.batches.folder import Batches
from paceline.server.generation.service import Service
from paceline.server.observability.metrics.exporter import exporting
from paceline.server.settings.config import ServerConfig
from paceline.server.transport.watched import Watched

__all__ = ["bind", "serve"]

_log = logging.getLogger("paceline.server")

# seconds for finished answers to reach their callers
_FLUSH_SECONDS: Final = 5
# seconds that the batches' disk writes get after a second signal
_DISK_SECONDS: Final = 2.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def serve(
    client: EngineClient,
    config: ServerConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    listener: socket.socket | None = None,
    metrics_listener: socket.socket | None = None,
    on_ready: Callable[[str, int], None] | None = None,
    page: Callable[[Service], APIRouter] | None = None,
    models: SeveralModels | None = None,
) -> int:
    """Serve until a signal or the engine's end; return the exit code of the process.

    Runs on the main thread's event loop, whose signal handlers it takes over. Closes ``client``.

    Args:
        listener: an already bound socket (``bind``), used and closed instead of host and port.
        metrics_listener: a bound socket on which threads of their own (``metrics.exporter``) serve
            /metrics alone; closed.
        on_ready: called once with host and port when connections are accepted.
        page, models: see ``create_app``.

    Raises:
        ConfigError: the address is taken, or the batch folder cannot be used.
    """
    try:
        if listener is None:
            listener = bind(host, port)
        app = create_app(client, config, page=page, models=models)
        service = service_of(app)
        life = _Life(service, app, batches_of(app), listener)
        if service.adapters is not None:
            try:
                await service.adapters.load_given()
            except (InvalidRequestError, HttpError) as error:
                raise ConfigError(f"--lora-modules: {error}") from None
        async with exporting(service.metrics, metrics_listener):
            return await life.run(on_ready)
    finally:
        await client.close()


class _Life:
    """One run of ``serve``."""

    def __init__(
        self, service: Service, app: object, batches: Batches, listener: socket.socket
    ) -> None:
        self._service = service
        self._watched: Watched | None = None
        if service.config.exit_unwatched:
            app = self._watched = Watched(cast(ASGIApp, app), service.config.exit_unwatched)
        self._batches = batches
        self._listener = listener
        self._signals = 0
        # the batches were not stopped cleanly
        self._abandoned = False
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        bounds = service.config.bounds
        bounds = replace(bounds, max_connections=allow_open_files(bounds))
        self._server = _Server(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=functools.partial(  # type: ignore[arg-type]
                    Connection,
                    bounds=bounds,
                    readers=service.slow_readers,
                    slow_reader_timeout=service.config.slow_reader_timeout,
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
                ssl_certfile=service.config.ssl_certfile,
                ssl_keyfile=service.config.ssl_keyfile,
            )
        )

    async def run(self, on_ready: Callable[[str, int], None] | None) -> int:
        service = self._service
        service.client.on_dead = self._engine_died
        try:
            service.client.check_health()
        except EngineLostError:
            # the client replaces the engine; until then requests get 503
            pass
        except EngineDeadError as error:
            # the engine died before the server accepted connections
            self._engine_died(error)
        with self._handling_signals():
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
            try:
                await self._started(serving)
                await self._batches.start()
                if on_ready is not None and service.dead is None:
                    address = self._listener.getsockname()
                    on_ready(address[0], address[1])
                watching = asyncio.ensure_future(self._end_unwatched())
                await self._until(serving, self._stop)
                watching.cancel()
                await self._drain()
            finally:
                self._server.should_exit = True
                await serving
                await service.end_side_work()
                await self._stop_batches()
                await service.responses.close()
                service.prompts.close()
                if service.tracing is not None:
                    await asyncio.to_thread(service.tracing.close)
                if service.limiter is not None:
                    await service.limiter.close()
        return 0 if service.dead is None else 1

    async def _started(self, serving: asyncio.Future[None]) -> None:
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)

    async def _until(self, serving: asyncio.Future[None], event: asyncio.Event) -> None:
        """Wait for ``event``, or for the end of serving, which raises its error."""
        waiting = asyncio.ensure_future(event.wait())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def _end_unwatched(self) -> None:
        """End a replica that serves no request once nothing watches it any more."""
        watched = self._watched
        while watched is not None:
            await asyncio.sleep(watched.interval)
            if watched.is_unwatched and not self._service.in_flight:
                _log.warning("unwatched seconds=%g", watched.seconds)
                self._stop.set()
                return

    async def _drain(self) -> None:
        """Let running requests finish and their answers be sent."""
        service = self._service
        service.draining = True
        await service.end_side_work()
        # batch lines stop first: their state is kept, and the next server repeats them
        await self._stop_batches()
        if service.dead is None:
            timeout = service.config.drain_timeout
            _log.info("draining in_flight=%d timeout=%g", service.in_flight, timeout)
            draining = asyncio.ensure_future(service.client.drain(timeout))
            at_once = asyncio.ensure_future(self._stop_now.wait())
            await asyncio.wait((draining, at_once), return_when=asyncio.FIRST_COMPLETED)
            at_once.cancel()
            if not draining.done():
                draining.cancel()
                await service.client.drain(0.0)
        if service.in_flight:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_SECONDS):
                    await service.idle.wait()

    async def _stop_batches(self) -> None:
        """Stop the batches; after a second signal do not wait for their disk writes."""
        if self._abandoned:
            return
        stopping = asyncio.ensure_future(self._batches.stop())
        at_once = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait((stopping, at_once), return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not stopping.done():
            self._batches.hurry()
            await asyncio.wait((stopping,), timeout=_DISK_SECONDS)
        if stopping.done():
            await stopping
        else:
            stopping.cancel()
            self._abandoned = True
            _log.warning("batches_abandoned reason='their disk does not answer'")

    def _engine_died(self, error: EngineDeadError) -> None:
        _log.error("engine_dead reason=%r in_flight=%d", str(error), self._service.in_flight)
        self._service.dead = str(error)
        self._stop.set()

    def _signalled(self, number: signal.Signals) -> None:
        self._signals += 1
        _log.info("signal name=%s count=%d", number.name, self._signals)
        self._stop.set()
        if self._signals > 1:
            self._stop_now.set()

    @contextlib.contextmanager
    def _handling_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """uvicorn would close its sockets at the first signal; here ``_Life`` decides."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
