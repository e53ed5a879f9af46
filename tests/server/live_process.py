"""Starts ``live`` and talks to it over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.server.helpers import metric

_ROOT = Path(__file__).parents[2]


class LiveServer:
    """One server process. ``errors`` has its log once it ended."""

    def __init__(self, log: Path, settings: dict[str, Any]) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.server.live", json.dumps(settings)],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.engine_pid: int | None = None
        self.metrics_port = 0
        self.port = self._wait_ready()
        self.url = f"http://127.0.0.1:{self.port}"

    def _wait_ready(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, *rest = line.decode().split()
            if word == "engine":
                self.engine_pid = int(rest[0])
            if word == "metrics":
                self.metrics_port = int(rest[0])
            if word == "ready":
                return int(rest[1])
        raise AssertionError(self.log())

    def log(self) -> str:
        return self._log.read_text()

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=20).text

    def running(self) -> float:
        return metric(self.metrics(), "vllm:num_requests_running")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 20) -> int:
        return self.process.wait(timeout)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def live_server(log: Path, **settings: Any) -> Iterator[LiveServer]:
    server = LiveServer(log, settings)
    try:
        yield server
    finally:
        server.stop()


def eventually(holds: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait until ``holds()``; AssertionError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not so after {timeout} s"
        time.sleep(0.01)


def raw_request(path: str, body: dict[str, Any]) -> bytes:
    """A POST as bytes, for tests that hang up halfway."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
