"""Callers that do not read their answers.

::

    engine --> stream: unread output, merged --> transport --> socket: SEND_BUFFER_BYTES
               (text and ids of one answer)          |
                                                      over UNSENT_BYTES for slow_reader_timeout, and
                                                      less than _MIN_RATE was read: cut

So a connection costs its buffers and the rest of one answer, for a bounded time. Cutting it is a
disconnect like any other: the request is aborted and its blocks are free.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["SlowReaders", "WatchedProtocol"]

_log = logging.getLogger("paceline.server")

# bytes that this process holds in addition before it stops taking more of an answer
UNSENT_BYTES: Final = 16 * 1024
# minimum download rate, bytes/s, of an answer that was written in one piece
_MIN_RATE: Final = 4096


@dataclass(slots=True, eq=False)
class SlowReaders:
    """Counts of one app's connections, for its metrics."""

    # connections whose buffers are full
    waiting: int = 0
    # connections cut off
    num_cut: int = 0


class WatchedProtocol(HttpToolsProtocol):
    """One connection. The transport says when its buffer is full and when it is no longer.

    Args:
        readers: counts.
        slow_reader_timeout: seconds it may be full, and again the same for each period in which
            ``_MIN_RATE`` bytes/s of it were read; 0: no limit.
    """

    def __init__(
        self, *arguments: Any, readers: SlowReaders, slow_reader_timeout: float, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._readers = readers
        self._slow_timeout = slow_reader_timeout
        self._patience: asyncio.TimerHandle | None = None
        self._full = False
        # bytes in the buffer when the timeout began
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._full:
            self._full = True
            self._readers.waiting += 1
            if self._slow_timeout > 0:
                self._wait()

    def resume_writing(self) -> None:
        self._relieved()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relieved()
        super().connection_lost(exc)

    def _relieved(self) -> None:
        if self._full:
            self._full = False
            self._readers.waiting -= 1
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _wait(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._patience = self.loop.call_later(self._slow_timeout, self._cut)

    def _cut(self) -> None:
        """Cut the connection, unless it is being read: a large answer on a slow line takes time."""
        read = self._unread - self.transport.get_write_buffer_size()
        if read >= _MIN_RATE * self._slow_timeout:
            self._wait()
            return
        self._readers.num_cut += 1
        _log.warning(
            "slow_reader_cut client=%s seconds=%g unread_bytes=%d",
            "" if self.client is None else self.client[0],
            self._slow_timeout,
            self.transport.get_write_buffer_size(),
        )
        # close() would wait until all is read
        self.transport.abort()
