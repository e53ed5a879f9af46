"""An engine in this process, on its own thread: for tests, small uses, several at once.

The same loop and the same messages as ``client``, without sockets. Text work and the engine share
one interpreter here, so a server that should not stall uses a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Sequence

from paceline.engine.core import EngineCore
from paceline.engine.process.frontend import EngineFrontend
from paceline.engine.process.loop import EngineLoop, engine_stats
from paceline.engine.process.messages import (
    ClientMessage,
    Dead,
    EngineMessage,
    Shutdown,
    TimelineNews,
)
from paceline.engine.protocol import Sink, Tokenizer
from paceline.engine.types import AdapterStatus, EngineInfo, GenerationOutput, GenerationRequest

__all__ = ["LocalEngineClient"]

_log = logging.getLogger(__name__)


class LocalEngineClient(EngineFrontend):
    """An engine on a thread.

    Made on any thread; bound to the event loop of the first ``generate`` or ``load_adapter``, and
    used on that one from then on. ``close`` also works before any ``generate``.

    Args:
        core: owned from here on; its thread alone touches it.
        stall_timeout: see ``EngineFrontend``.
    """

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        tokenizer: Tokenizer,
        *,
        stall_timeout: float = 60.0,
    ) -> None:
        super().__init__(tokenizer, engine_stats(core, 0.0), stall_timeout)
        self._info = info
        self._core = core
        self._inbox = _QueueInbox()
        if core.blocks is not None:
            core.blocks.wake = self._inbox.wake
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        self._bind()
        outputs = super().generate(request, sink)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def load_adapter(self, key: str, path: str, *, pinned: bool = False) -> AdapterStatus:
        self._bind()
        return await super().load_adapter(key, path, pinned=pinned)

    def _bind(self) -> None:
        """Take messages on the running event loop from now on."""
        loop = asyncio.get_running_loop()
        if self._event_loop is None or self._event_loop.is_closed():
            self._event_loop = loop
        elif self._event_loop is not loop:
            raise RuntimeError("a LocalEngineClient serves one event loop at a time")

    async def close(self) -> None:
        self.on_dead = None
        self._draining = True
        self._die("the engine was closed")
        self._inbox.put(Shutdown())
        # several closers may wait for the one thread
        await asyncio.to_thread(self._thread.join)

    def _send(self, message: ClientMessage) -> None:
        self._inbox.put(message)

    def _run(self) -> None:
        try:
            EngineLoop(self._core, self._inbox, self._emit).run()
        except Exception as error:
            _log.exception("the engine failed")
            self._emit(Dead.of(error))
        finally:
            self._core.close()

    def _emit(self, message: EngineMessage) -> None:
        """Pass a message from the engine's thread to the event loop."""
        loop = self._event_loop
        if loop is None:
            # without a ``generate`` so far there are only heartbeats, and maybe the engine's end
            if not isinstance(message, TimelineNews):
                self._receive(message)
            return
        with contextlib.suppress(RuntimeError):
            # the loop was closed under its requests; they have no reader any more
            loop.call_soon_threadsafe(self._receive, message)


class _QueueInbox:
    """An ``Inbox`` between two threads."""

    def __init__(self) -> None:
        # None: a wake-up without a message
        self._queue: queue.SimpleQueue[ClientMessage | None] = queue.SimpleQueue()

    def wake(self) -> None:
        self._queue.put(None)

    def put(self, message: ClientMessage) -> None:
        self._queue.put(message)

    def receive(self, timeout: float) -> Sequence[ClientMessage]:
        messages: list[ClientMessage | None] = []
        with contextlib.suppress(queue.Empty):
            if timeout > 0:
                messages.append(self._queue.get(timeout=timeout))
            while True:
                messages.append(self._queue.get_nowait())
        return [message for message in messages if message is not None]
