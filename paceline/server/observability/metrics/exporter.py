"""``/metrics`` on a separate listener, answered by a separate process.

::

    event loop --render, 20 times a second--> shared memory <--read-- exporter process <-- scrapes

A scrape of the server's own port waits for its turn on the event loop, behind every active stream.
One of this listener does not: neither the loop nor the interpreter's lock delays it. The text it
reads is at most ``PERIOD`` old, plus the time the loop was busy, and states its age.
docs/adr/0008-metrics-listener.md has the measurement behind this choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

from paceline.engine.types import EngineStats
from paceline.server.observability.metrics.exporter_process import HEADER, SEQUENCE
from paceline.server.observability.metrics.server import ServerMetrics

__all__ = ["PERIOD", "MetricsExporter", "exporting"]

_log = logging.getLogger("paceline.server")

# seconds between renderings while the engine sends snapshots
PERIOD: Final = 0.05
# seconds between renderings without new snapshots, and between starts of the process
_IDLE_PERIOD: Final = 1.0
_CAPACITY: Final = 8 * 2**20
_PROGRAM: Final = Path(__file__).with_name("exporter_process.py")
# seconds that the process may take to end
_GRACE: Final = 2.0


class MetricsExporter:
    """Publishes one app's metrics until ``close``. Used on the event loop.

    Args:
        listener: a listening socket; the caller keeps it and closes it afterwards.
    """

    def __init__(self, metrics: ServerMetrics, listener: socket.socket) -> None:
        self._metrics = metrics
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._fd = os.memfd_create("paceline-metrics")
        # pages that are never written use no memory
        os.ftruncate(self._fd, _CAPACITY)
        self._memory = mmap.mmap(self._fd, _CAPACITY)
        self._sequence = 0
        self._shown: EngineStats | None = None
        self._shown_at = 0.0
        self._publish()
        self._process = self._spawn()
        self._spawned_at = time.monotonic()
        self._timer = self._loop.call_later(PERIOD, self._tick)

    @property
    def pid(self) -> int:
        """Pid of the process that answers."""
        return self._process.pid

    def close(self) -> None:
        """End the process. The listener stays open."""
        self._timer.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            # suspended or starved; it holds no state
            self._process.kill()
            self._process.wait()
        self._memory.close()
        os.close(self._fd)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(PERIOD, self._tick)
        now = time.monotonic()
        if self._metrics.stats is not self._shown or now - self._shown_at >= _IDLE_PERIOD:
            self._publish()
        if self._process.poll() is not None and now - self._spawned_at >= _IDLE_PERIOD:
            _log.error("metrics_exporter_ended code=%s: started again", self._process.returncode)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = self._spawn()
            self._spawned_at = now

    def _publish(self) -> None:
        self._shown = self._metrics.stats
        text = self._metrics.render()
        self._shown_at = time.monotonic()
        if len(text) > _CAPACITY - HEADER.size:
            # labels are bounded, so this is a bug here; the age of the served text shows it
            _log.error("metrics_too_long bytes=%d limit=%d", len(text), _CAPACITY - HEADER.size)
            return
        memory = self._memory
        SEQUENCE.pack_into(memory, 0, self._sequence + 1)
        memory[HEADER.size : HEADER.size + len(text)] = text
        HEADER.pack_into(memory, 0, self._sequence + 1, len(text), self._shown_at)
        self._sequence += 2
        SEQUENCE.pack_into(memory, 0, self._sequence)

    def _spawn(self) -> subprocess.Popen[bytes]:
        fds = (self._listener.fileno(), self._fd)
        # in a process group of its own, so that Ctrl-C in the terminal does not reach it
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=fds,
            process_group=0,
        )


@contextlib.contextmanager
def exporting(
    metrics: ServerMetrics, listener: socket.socket | None
) -> Generator[MetricsExporter | None, None, None]:
    """Serve ``metrics`` on ``listener`` within the block, then close it; None: do nothing."""
    if listener is None:
        yield None
        return
    with listener:
        exporter = MetricsExporter(metrics, listener)
        try:
            yield exporter
        finally:
            exporter.close()
