"""An engine in a process of its own, as a server sees it.

This module starts and watches the child and carries messages; ``frontend`` handles requests. The
child's program is given as a command line, so nothing here knows models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from paceline.engine.process.frontend import EngineFrontend, happens_within
from paceline.engine.process.in_flight import read_in_flight
from paceline.engine.process.messages import (
    IPC,
    ClientMessage,
    Dead,
    Launch,
    Ready,
    Shutdown,
    decode_engine_message,
    encode,
)
from paceline.engine.protocol import Tokenizer
from paceline.engine.types import EngineInfo, EngineStats
from paceline.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from paceline.engine.process.forks import ForkedProcess, ForkServer

__all__ = ["ProcessEngineClient"]

_log = logging.getLogger(__name__)

# most messages received in one turn of the event loop, so that HTTP work gets its turn under load
_BURST: Final = 4
# seconds for an engine to end by itself, and then after SIGTERM
_CLOSE_GRACE: Final = 5.0
_TERM_GRACE: Final = 2.0
# seconds for a dead engine's last messages to arrive after its exit
_LAST_WORDS: Final = 0.1


class ProcessEngineClient(EngineFrontend):
    """Make one with ``await ProcessEngineClient.start(...)``; used on that event loop only."""

    def __init__(self, child: _Child, tokenizer: Tokenizer, stall_timeout: float) -> None:
        assert child.info is not None, "the engine is not ready"
        info = child.info
        super().__init__(tokenizer, EngineStats.at_rest(info), stall_timeout)
        self._info = info
        self._child = child
        self._closing: asyncio.Task[None] | None = None
        child.on_message = self._receive
        child.on_exit = self._die

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        config: bytes,
        load_tokenizer: Callable[[], Tokenizer],
        *,
        ready_timeout: float = 600.0,
        stall_timeout: float = 60.0,
        forks: ForkServer | None = None,
    ) -> ProcessEngineClient:
        """Start the engine and wait until it is ready.

        Args:
            argv: a command line whose program calls ``engine_main``.
            config: argument of that program's builder.
            load_tokenizer: called on a thread while the engine loads its model.
            ready_timeout: seconds for both.
            stall_timeout: see ``EngineFrontend``.
            forks: makes processes of the same program sooner.

        Raises:
            ConfigError, CheckpointError: as the engine's builder raised them.
            EngineDeadError: it failed otherwise, or was not ready in time. Its own output went to
                this process's stderr.
        """
        # other engines' tokens pass through this event loop while the fork is made
        forked = None if forks is None else await asyncio.to_thread(forks.take)
        child = _Child(argv, config, forked)
        loading = asyncio.to_thread(load_tokenizer)
        try:
            async with asyncio.timeout(ready_timeout):
                _, tokenizer = await asyncio.gather(child.wait_ready(), loading)
        except TimeoutError:
            await child.close()
            raise EngineDeadError(
                f"the engine was not ready within {ready_timeout:.0f} s; its output is above"
            ) from None
        except BaseException:
            await child.close()
            raise
        return cls(child, tokenizer, stall_timeout)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def pid(self) -> int:
        """The engine process, for logs."""
        return self._child.pid

    @property
    def is_stopped(self) -> bool:
        """Whether the OS has stopped the process (SIGSTOP); False if that cannot be read."""
        return self._child.is_stopped

    def requests_in_flight(self) -> frozenset[str] | None:
        """Return the ids in the engine's latest steps, also right after its end; None: unknown."""
        return read_in_flight(self._child.in_flight_path)

    async def wait_exit(self, timeout: float) -> None:
        """Wait until the process has ended, at most ``timeout`` seconds."""
        await happens_within(self._child.exited, timeout)

    def kill(self, reason: str) -> None:
        """End the process at once, in any state; its requests fail with ``reason``."""
        self._die(reason)
        self._child.kill()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.on_dead = None
        self._draining = True
        self._die("the engine was closed")
        await self._child.close()

    def _send(self, message: ClientMessage) -> None:
        self._child.send(message)


class _Child:
    """The process, its sockets and its end."""

    def __init__(self, argv: Sequence[str], config: bytes, started: ForkedProcess | None) -> None:
        self.info: EngineInfo | None = None
        self.on_message: Callable[..., None] = self._before_ready
        # called with the reason, once, when the process ended and its last messages were delivered
        self.on_exit: Callable[[str], None] = self._failed_to_start
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.exited = asyncio.Event()
        self._closed = False
        try:
            self._directory = _socket_directory()
        except OSError as error:
            raise EngineDeadError(f"no directory for the engine's sockets: {error}") from error
        self._inbox_address = f"{IPC}{self._directory / 'inbox'}"
        outbox = f"{IPC}{self._directory / 'outbox'}"
        self._context = zmq.Context(io_threads=1)
        self.in_flight_path = self._directory / "in-flight"
        launch = Launch(
            inbox=self._inbox_address,
            outbox=outbox,
            in_flight=str(self.in_flight_path),
            config=config,
        )
        try:
            self._outbox = self._context.socket(zmq.PULL)
            self._outbox.set_hwm(0)
            self._outbox.bind(outbox)
            self._inbox = self._context.socket(zmq.PUSH)
            # requests wait in the engine's queue, not here: sending never blocks the event loop
            self._inbox.set_hwm(0)
            self._inbox.setsockopt(zmq.LINGER, 0)
            self._process = started or _spawn(argv)
            assert self._process.stdin is not None
            # the watch thread notices a child that has ended already
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
        except (OSError, zmq.ZMQError) as error:
            self._release()
            raise EngineDeadError(f"the engine process could not be started: {error}") from error
        self._fd = self._outbox.FD
        self._loop.add_reader(self._fd, self._read)
        self._read()
        threading.Thread(target=self._wait, name="engine-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_bytes()
        except OSError:
            return False
        # the name before it, in parentheses, may hold any characters
        return stat.rpartition(b")")[2].split()[:1] == [b"T"]

    def kill(self) -> None:
        if not self.exited.is_set():
            self._process.send_signal(signal.SIGKILL)

    async def wait_ready(self) -> None:
        await self._ready

    def send(self, message: ClientMessage) -> None:
        # Again: the engine is not connected any more, and the watch thread will report its end
        with contextlib.suppress(zmq.Again):
            if not self._inbox.closed:
                self._inbox.send(encode(message), zmq.NOBLOCK)

    async def close(self) -> None:
        """End the process, gently at first, and remove its files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.on_exit = _ignore
        self.on_message = _ignore
        self.send(Shutdown())
        steps: tuple[tuple[int | None, float], ...] = (
            (None, _CLOSE_GRACE if self.info is not None else 0.0),
            (signal.SIGTERM, _TERM_GRACE),
            # this ends a stopped (SIGSTOP) or stuck process, too
            (signal.SIGKILL, _CLOSE_GRACE),
        )
        for number, grace in steps:
            if number is not None and not self.exited.is_set():
                self._process.send_signal(number)
            await happens_within(self.exited, grace)
        self._loop.remove_reader(self._fd)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)
        # it waits for threads
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        # closes all sockets, too
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _read(self) -> None:
        """Handle messages until none is left, as the descriptor signals only the first new one."""
        if self._take(_BURST):
            self._loop.call_soon(self._read)

    def _take(self, limit: int) -> bool:
        """Deliver up to ``limit`` messages; return whether there may be more."""
        for _ in range(limit):
            if self._outbox.closed:
                return False
            try:
                data = self._outbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                self.on_message(decode_engine_message(data))
            except Exception as error:
                # without this message, requests would wait for ever
                _log.exception("a message of the engine could not be handled")
                self.on_exit(f"a message of the engine could not be handled: {error!r}")
        return True

    def _before_ready(self, message: object) -> None:
        if isinstance(message, Ready):
            self.info = message.info
            # the engine is bound, so this connects at once
            self._inbox.connect(self._inbox_address)
            if not self._ready.done():
                self._ready.set_result(None)
        elif isinstance(message, Dead) and not self._ready.done():
            self._ready.set_exception(message.error())

    def _failed_to_start(self, reason: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(reason))

    def _wait(self) -> None:
        """Wait for the process's end, on a thread of its own."""
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):
            # the event loop may be closed already, and nothing waits for this any more
            self._loop.call_soon_threadsafe(self._gone, code)

    def _gone(self, code: int) -> None:
        self.exited.set()
        self._loop.call_later(_LAST_WORDS, self._conclude, code)

    def _conclude(self, code: int) -> None:
        if not self._closed:
            while self._take(_BURST):
                pass
            self.on_exit(_cause(code))


def _spawn(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    # stdout is the caller's own, and the engine's output is for people. A process group of its own
    # keeps the terminal's Ctrl-C away from it
    return subprocess.Popen(list(argv), stdin=subprocess.PIPE, stdout=2, bufsize=0, process_group=0)


def _cause(code: int) -> str:
    if code < 0:
        return f"the engine process was killed by {signal.Signals(-code).name}"
    return f"the engine process ended unexpectedly with exit code {code}; its output is above"


def _ignore(_: object) -> None:
    """Ignore messages of an engine that is being closed."""


def _socket_directory() -> Path:
    """Make a directory that only this user can enter, with a path short enough for sockets.

    Raises:
        ConfigError: paths in the temporary directory and in /tmp are too long.
    """
    tried = []
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        path = os.path.join(parent, "paceline-xxxxxxxx", "outbox")
        size = len(os.fsencode(path))
        if size <= zmq.IPC_PATH_MAX_LEN:
            # mkdtemp makes it with mode 0700
            return Path(tempfile.mkdtemp(prefix="paceline-", dir=parent))
        tried.append(f"{parent} ({size} bytes)")
    raise ConfigError(
        f"socket paths may have {zmq.IPC_PATH_MAX_LEN} bytes; too long under {', '.join(tried)}. "
        "Set TMPDIR to a shorter directory"
    )
