"""A real redis-server for tests, on a socket of its own in a folder of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

__all__ = ["RedisServer"]


class RedisServer:
    """Started at once; ``stop`` when done. Skips the test where there is no redis-server."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("there is no redis-server here (Debian: apt-get install redis-server)")
        self._program = program
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                self._program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "no", "--dir", str(self._folder), "--logfile", "log",
            ]
        )  # fmt: skip
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """As if the machine went away."""
        self._process.kill()
        self._process.wait(10)
