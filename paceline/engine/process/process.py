"""The program of an engine's own process.

::

    client                                   engine process
      stdin: one line of JSON (Launch) ------->  build the core
      inbox.sock   Add, Abort, Shutdown ------>  EngineLoop
      outbox.sock  <------ Ready, Outputs, Refused, Dead

Both sockets are Unix sockets in a directory that only this user can enter; nothing listens on a
network. Stdin stays open as a sign of life: when it ends, so do parent and engine.

The entry module belongs to the composition root; it calls ``engine_main`` with a function that
builds the core, and this module never learns what a model is.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq

from paceline.engine.core import EngineCore
from paceline.engine.process.contention import watch_contention
from paceline.engine.process.garbage import collected_seldom, uncollected
from paceline.engine.process.in_flight import InFlightFile
from paceline.engine.process.loop import EngineLoop
from paceline.engine.process.messages import (
    IPC,
    ClientMessage,
    Dead,
    EngineMessage,
    Launch,
    Ready,
    Shutdown,
    decode_client_message,
    encode,
)
from paceline.engine.types import EngineInfo
from paceline.errors import EngineDeadError, PacelineError

__all__ = ["EngineBuilder", "engine_main"]

# makes the core from ``Launch.config``
EngineBuilder = Callable[[bytes], tuple[EngineCore, EngineInfo]]

# seconds for a last message to leave, and for a step to end once the parent has ended
_LINGER: Final = 2.0
_ORPHAN_GRACE: Final = 5.0
_PARENT_GONE: Final = "the parent process is gone"

_log = logging.getLogger(__name__)


def engine_main(
    build: EngineBuilder,
    shared: Callable[[bytes], Sequence[Path]] = lambda _: (),
    ending: Callable[[bytes], None] = lambda _: None,
    client: int | None = None,
) -> int:
    """Run an engine process from start to end; return its exit code.

    Args:
        shared: returns the temporary folders that the client's engines share, by the settings. They
            are removed, as that of the sockets is, once the client has ended without doing so.
        ending: called with the settings before an orderly end, which frees memory.
        client: the client's process; None: this one's parent.

    0 after an orderly end, 1 when building or running failed, 143 after SIGTERM. A failure has been
    sent to the client (``Dead``) and, with its traceback, to stderr.
    """
    # a terminal sends Ctrl-C to all its processes; the parent decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = _read_line(sys.stdin.fileno())
    if not line.endswith(b"\n"):
        _log.error("no settings on stdin: an engine process is started by its client")
        return 1
    launch = msgspec.json.decode(line, type=Launch)
    context = zmq.Context(io_threads=1)
    outbox = context.socket(zmq.PUSH)
    # a slow client must not stall a step; max_tokens bounds the queue
    outbox.set_hwm(0)
    outbox.setsockopt(zmq.LINGER, int(_LINGER * 1000))
    outbox.connect(launch.outbox)
    sockets = Path(launch.outbox.removeprefix(IPC)).parent
    watch = _Watch(sys.stdin.fileno(), [sockets, *shared(launch.config)])
    try:
        return _build_and_run(build, launch, context, outbox, watch, ending, client)
    finally:
        outbox.close()
        context.term()
        watch.clean_up()


def _build_and_run(
    build: EngineBuilder,
    launch: Launch,
    context: zmq.Context[zmq.Socket[bytes]],
    outbox: zmq.Socket[bytes],
    watch: _Watch,
    ending: Callable[[bytes], None],
    client: int | None,
) -> int:
    def send(message: EngineMessage) -> None:
        outbox.send(encode(message))

    try:
        with uncollected():
            core, info = build(launch.config)
    except Exception as error:
        _report("the engine could not start", error)
        send(Dead.of(error))
        return 1
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)
    inbox.bind(launch.inbox)
    in_flight = InFlightFile(Path(launch.in_flight), core.pipeline_depth)
    watch.catch_sigterm()
    messages = _SocketInbox(inbox, watch)
    if core.blocks is not None:
        core.blocks.wake = messages.wake
    try:
        send(Ready(info))
        watch_contention(client)
        with collected_seldom():
            shutdown = EngineLoop(
                core,
                messages,
                send,
                at_rest=gc.collect,
                in_flight=in_flight,
            ).run()
            ending(launch.config)
    except Exception as error:
        _report("the engine failed", error)
        send(Dead.of(error))
        return 1
    finally:
        messages.close()
        core.close()
        in_flight.close()
    if not shutdown.reason:
        return 0
    send(Dead.of(EngineDeadError(f"the engine stopped: {shutdown.reason}")))
    return 128 + signal.SIGTERM


def _report(what: str, error: Exception) -> None:
    """Write an error to stderr; with a traceback only if it is unforeseen."""
    foreseen = isinstance(error, PacelineError) and not isinstance(error, EngineDeadError)
    _log.error("%s: %s", what, error, exc_info=None if foreseen else error)


def _read_line(fd: int) -> bytes:
    """Read one line, unbuffered: the watch reads the rest of the descriptor."""
    chunks = bytearray()
    while not chunks.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        chunks += chunk
    return bytes(chunks)


class _Watch:
    """Notices SIGTERM and the end of the parent, and wakes the wait for messages."""

    def __init__(self, stdin_fd: int, directories: Sequence[Path]) -> None:
        self.reason = ""
        self._directories = directories
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        threading.Thread(
            target=self._wait_for_parent, args=(stdin_fd,), name="parent-watch", daemon=True
        ).start()

    @property
    def wake_fd(self) -> int:
        """File descriptor that is readable once ``reason`` is set."""
        return self._reader.fileno()

    def catch_sigterm(self) -> None:
        """End the loop on SIGTERM from here on, which simply kills until then."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop("it was told to (SIGTERM)"))
        # the handler runs between bytecodes; this wakes a wait in C at once
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def clean_up(self) -> None:
        """Remove the directories if the client, which normally does that, has ended."""
        if self.reason == _PARENT_GONE:
            for directory in self._directories:
                shutil.rmtree(directory, ignore_errors=True)

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            # full of earlier wake-ups, which suffice
            return

    def _wait_for_parent(self, stdin_fd: int) -> None:
        while os.read(stdin_fd, 4096):
            pass
        self._stop(_PARENT_GONE)
        time.sleep(_ORPHAN_GRACE)
        # still here: loading, or stuck in a step whose caller has ended
        self.clean_up()
        os._exit(1)


class _SocketInbox:
    """An ``Inbox`` on a PULL socket; a watch's signal arrives as a Shutdown."""

    def __init__(self, inbox: zmq.Socket[bytes], watch: _Watch) -> None:
        self._socket = inbox
        self._watch = watch
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(watch.wake_fd, zmq.POLLIN)
        self._poller.register(self._reader.fileno(), zmq.POLLIN)

    def close(self) -> None:
        self._socket.close()
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """Make a waiting ``receive`` return. Called from any thread."""
        with contextlib.suppress(OSError):
            # full of earlier wake-ups, which suffice, or closed
            self._writer.send(b"\0")

    def receive(self, timeout: float) -> Sequence[ClientMessage]:
        messages: list[ClientMessage] = []
        if timeout > 0:
            self._poller.poll(int(timeout * 1000))
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)
        if self._watch.reason:
            messages.append(Shutdown(self._watch.reason))
            return messages
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(decode_client_message(data))
