"""A ``paceline serve`` to be hurt, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from benchmarks.faults.callers import get

__all__ = ["FaultyServer", "metric"]

_READY_SECONDS = 120.0


class FaultyServer:
    """One server process; ends with the block.

    Args:
        log: its standard error goes there.
        around: a command that runs the server's, in its own place.
    """

    def __init__(self, model: str, log: Path, *flags: str, around: tuple[str, ...] = ()) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [*around, sys.executable, "-m", "paceline.cli.main", "serve", model]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd=Path(__file__).resolve().parents[2],
            )
        self._log = log
        deadline = time.monotonic() + _READY_SECONDS
        while asyncio.run(get(self.port, "/health"))[0] != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log()[-2000:]}")
            time.sleep(0.05)

    def __enter__(self) -> FaultyServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def engine_pid(self) -> int:
        """Of the engine process that is there now. LookupError if there is none."""
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = entry.read_text().rpartition(")")[2].split()
                if int(fields[1]) != self.process.pid or fields[0] == "Z":
                    continue
                # the server may have other children
                if b"engine_process" in (entry.parent / "cmdline").read_bytes():
                    return int(entry.parent.name)
        raise LookupError("the server has no engine process")

    def rss_mb(self) -> float:
        """Resident memory of the API process, MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
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
        """When ``path``'s status was first as ``wanted``; TimeoutError after so many seconds."""
        async with asyncio.timeout(seconds):
            while not wanted((await get(self.port, path))[0]):
                await asyncio.sleep(0.02)
        return time.monotonic()

    async def at_rest(self) -> float:
        """Wait until nothing runs; the share of KV blocks still taken, which should be 0."""
        async with asyncio.timeout(60.0):
            while True:
                text = await self.scrape()
                busy = metric(text, "vllm:num_requests_running")
                if not busy + metric(text, "vllm:num_requests_waiting"):
                    return metric(text, "vllm:kv_cache_usage_perc")
                await asyncio.sleep(0.05)


def metric(text: str, name: str) -> float:
    """The sum of a metric's samples; KeyError if there are none."""
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    if not found:
        raise KeyError(name)
    return sum(float(value) for value in found)
