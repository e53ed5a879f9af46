"""Real ``paceline serve`` processes for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["ServerProcess", "start_server"]

READY = re.compile(r"^paceline ready: (https?://\S+)/v1 \((.*)\)")


class ServerProcess:
    """One server, from its ready line on. Standard error is collected on a thread."""

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "paceline.cli.main", "serve", "--port", "0", *flags]
        began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | dict(env or {}),
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        self.seconds_to_ready = time.monotonic() - began
        match = READY.match(self.ready_line)
        if match is None:
            code = self.process.wait(30)
            self._reader.join(5)
            raise AssertionError(f"exit code {code}, {self.ready_line!r}, {''.join(self.errors)}")
        self.address, self.description = match[1], match[2]

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> tuple[int, str]:
        """Signal it and wait; its exit code and what it still printed on standard output."""
        self.process.send_signal(number)
        code = self.process.wait(timeout)
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        self._reader.join(5)
        return code, rest

    def request(self, path: str, body: Any = None, *, timeout: float = 30.0) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET, or of a POST when there is a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()


@contextmanager
def start_server(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server on a free port; killed at the end if the test did not stop it."""
    server = ServerProcess(*flags, env=env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.wait(20)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        assert server.process.stdout is not None and server.process.stderr is not None
        server._reader.join(5)
        server.process.stdout.close()
        server.process.stderr.close()
