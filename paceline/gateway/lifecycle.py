"""Life cycle of a gateway: bind, ask the engines, serve, drain, end.

SIGHUP makes it read its file again; a bad file changes nothing. SIGTERM and SIGINT end it: new
requests are refused, and running ones go on for up to ``drain_timeout`` seconds; a second signal
ends it at once.
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
from typing import Final

import uvicorn

from paceline.errors import ConfigError
from paceline.gateway.app import Gateway
from paceline.gateway.settings.config import GatewayConfig
from paceline.http.bounds import DEFAULT_BOUNDS
from paceline.http.connections import Connection, allow_open_files
from paceline.http.keys import KeyRing

__all__ = ["GatewayServer", "make_server", "serve_gateway"]

_log = logging.getLogger("paceline.gateway")

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# time for sent answers to reach their callers, s
_FLUSH_SECONDS: Final = 2
# interval of checks whether all callers are gone, s
_LOOK_SECONDS: Final = 0.005
# seconds after which a caller that reads nothing is disconnected
_SLOW_READER_SECONDS: Final = 30.0


def make_server(gateway: Gateway) -> GatewayServer:
    """Build a uvicorn server with the bounds of ``http``, which leaves signals alone."""
    bounds = replace(DEFAULT_BOUNDS, max_connections=allow_open_files(DEFAULT_BOUNDS))
    return GatewayServer(
        uvicorn.Config(
            gateway,
            http=functools.partial(  # type: ignore[arg-type]
                Connection,
                bounds=bounds,
                readers=gateway.slow_readers,
                slow_reader_timeout=_SLOW_READER_SECONDS,
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
    )


async def serve_gateway(
    gateway: Gateway,
    listener: socket.socket,
    on_ready: Callable[[str, int], None],
    read: Callable[[], tuple[GatewayConfig, KeyRing]] | None = None,
) -> int:
    """Serve until a signal; returns the exit code of the process.

    Runs on the main thread's event loop, takes over its signal handlers, closes ``listener``.

    Args:
        on_ready: called once with host and port when connections are accepted.
        read: reads configuration and keys again, on SIGHUP; if it raises ConfigError, nothing
            changes. None: SIGHUP is not handled.
    """
    server = make_server(gateway)
    stop, at_once = asyncio.Event(), asyncio.Event()

    def signalled(number: signal.Signals) -> None:
        _log.info("signal name=%s", number.name)
        (at_once if stop.is_set() else stop).set()

    reloads: set[asyncio.Task[None]] = set()

    def hung_up() -> None:
        assert read is not None, "the signal is taken where there is a file"
        task = asyncio.ensure_future(_reload(gateway, read))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signalled, number)
    if read is not None:
        loop.add_signal_handler(signal.SIGHUP, hung_up)
    await gateway.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        address = listener.getsockname()
        on_ready(address[0], address[1])
        await _first_of(stop.wait(), asyncio.shield(serving))
        await gateway.begin_draining()
        if gateway.in_flight:
            _log.info("draining in_flight=%d", gateway.in_flight)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(gateway.config.drain_timeout):
                    await _first_of(gateway.idle.wait(), at_once.wait())
    finally:
        server.stop()
        await serving
        await gateway.close()
        for number in (*_SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)
    return 0


async def _reload(gateway: Gateway, read: Callable[[], tuple[GatewayConfig, KeyRing]]) -> None:
    try:
        changed = await gateway.reload(*read())
    except ConfigError as error:
        _log.error("reload_refused reason=%r", str(error))
        return
    _log.info("reloaded changes=%d", len(changed))
    for change in changed:
        _log.info("reloaded %s", change)


async def _first_of(*waits: object) -> None:
    """Wait until one of them is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class GatewayServer(uvicorn.Server):
    """uvicorn without its own signal handlers, and without its check, ten times a second, whether
    to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Accept no more connections; ``serve`` returns once the running requests are answered."""
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        # called once, for the default headers of all answers
        await self.on_tick(0)
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:
                    await asyncio.sleep(_LOOK_SECONDS)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            _log.warning("cut_off requests=%d", len(state.tasks))
            for task in state.tasks:
                task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
