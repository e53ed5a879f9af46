"""A ``paceline serve`` to inject faults into, and its state as seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.client import get
from benchmarks.common.server import PacelineServer

__all__ = ["FaultyServer", "metric"]


class FaultyServer(PacelineServer):
    """One server; killed at the end of the block."""

    def __init__(self, model: str, log: Path, *flags: str, around: tuple[str, ...] = ()) -> None:
        super().__init__(model, *flags, log=log, around=around)

    def __exit__(self, *_: object) -> None:
        self.close(grace=0.0)

    @property
    def engine_pid(self) -> int:
        """Return the pid of the present engine process. Raises LookupError if there is none."""
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = entry.read_text().rpartition(")")[2].split()
                if int(fields[1]) != self.pid or fields[0] == "Z":
                    continue
                # the server may have other children
                if b"engine_process" in (entry.parent / "cmdline").read_bytes():
                    return int(entry.parent.name)
        raise LookupError("the server has no engine process")

    def rss_mb(self) -> float:
        """Return the resident memory of the API process, MiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None, "a running process has a resident size"
        return int(found[1]) / 1024

    def hurt(self, number: signal.Signals) -> None:
        os.kill(self.engine_pid, number)

    async def scrape(self) -> str:
        status, body = await get(self.port, "/metrics")
        if status != 200:
            raise RuntimeError(f"/metrics answered {status}")
        return body.decode()

    async def until(self, path: str, wanted: Callable[[int], bool], seconds: float) -> float:
        """Return when ``path``'s status was first ``wanted``. TimeoutError after ``seconds``."""
        async with asyncio.timeout(seconds):
            while not wanted((await get(self.port, path))[0]):
                await asyncio.sleep(0.02)
        return time.monotonic()

    async def at_rest(self) -> float:
        """Wait until nothing runs; return the share of KV blocks still taken, which should be 0."""
        async with asyncio.timeout(60.0):
            while True:
                text = await self.scrape()
                busy = metric(text, "vllm:num_requests_running")
                if not busy + metric(text, "vllm:num_requests_waiting"):
                    return metric(text, "vllm:kv_cache_usage_perc")
                await asyncio.sleep(0.05)


def metric(text: str, name: str) -> float:
    """Return the sum of a metric's samples. Raises KeyError if there are none."""
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    if not found:
        raise KeyError(name)
    return sum(float(value) for value in found)
