"""Servers: started, waited for, measured."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.client import complete, get
from benchmarks.common.load import FIRST_ID, Load, arrivals, describe, replay
from benchmarks.common.processes import REPOSITORY, Command, Process, Unavailable
from benchmarks.common.setup import Peer

__all__ = ["PacelineServer", "ReadyServer", "Server"]

# seconds between two requests to a server that starts, and between two looks into its log
_POLL_SECONDS = 0.05
_LOG_SECONDS = 0.005
# the formats in our server's ready line
_FORMATS = re.compile(r"\(\S+, (\w+) on \w+, \d+ KV blocks of \d+ tokens\b.* in (\w+),")
_READY = r"^paceline ready: https?://\S+:(\d+)/v1 "


class ReadyServer(Process):
    """A server that prints a line when it is ready: ``startup`` is how long that took, in seconds,
    ``port`` the first group of ``ready``.

    Args:
        ready: pattern of a line that it prints.
        seconds: limit on its start.

    Raises Unavailable when it does not become ready.
    """

    def __init__(
        self, argv: Sequence[str], ready: str, log: Path, *, seconds: float, cwd: Path = REPOSITORY
    ) -> None:
        began = time.monotonic()
        super().__init__(Command(tuple(argv)), log, cwd=cwd)
        try:
            self.port = int(self.line(ready, seconds)[1])
            self.startup = time.monotonic() - began
        except BaseException:
            self.close()
            raise

    def line(self, pattern: str, seconds: float = 10.0) -> re.Match[str]:
        """Wait for the first line of its log that matches. Raises Unavailable if none comes."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.log(), re.MULTILINE)) is None:
            if not self.alive or time.monotonic() > deadline:
                raise Unavailable(f"the server did not start: {self.tail()}")
            time.sleep(_LOG_SECONDS)
        return found


class PacelineServer(ReadyServer):
    """``paceline serve`` on a free port of 127.0.0.1.

    Args:
        around: a command that the server's command is passed to, and that execs it.
    """

    def __init__(
        self, *flags: str, log: Path, around: Sequence[str] = (), seconds: float = 120.0
    ) -> None:
        argv = (*around, sys.executable, "-m", "paceline.cli.main", "serve", *flags, "--port", "0")
        super().__init__(argv, _READY, log, seconds=seconds)


class Server(Process):
    """An engine's server that answers. ``startup`` is the seconds from its start to its first
    token, ``served`` the formats of its weights/KV cache.

    Raises Unavailable when there is none or it does not answer.
    """

    def __init__(self, peer: Peer, port: int, log: Path, vocab_size: int) -> None:
        self.name = peer.name
        self.port = port
        command = peer.server(port)
        began = time.monotonic()
        super().__init__(command, log)
        try:
            self._wait(began + command.start_seconds)
            self.startup = time.monotonic() - began
            chosen = _FORMATS.search(self.log()) if peer.served.startswith("auto/") else None
            self.served = f"{chosen[1]}/{chosen[2]}" if chosen else peer.served
            plan = arrivals(8.0, 1.0, None, vocab_size, seed=-1)
            asyncio.run(replay(port, self.model, plan))
        except BaseException:
            self.close()
            raise

    def _wait(self, deadline: float) -> None:
        prompt = list(range(FIRST_ID, FIRST_ID + 128))
        error = "it did not listen"
        while time.monotonic() < deadline:
            if not self.alive:
                raise Unavailable(f"the server ended: {self.tail()}")
            models = asyncio.run(_models(self.port))
            if models:
                self.model = models[0]
                timing = asyncio.run(complete(self.port, self.model, prompt, 1, timeout=60))
                if not timing.error:
                    return
                error = timing.error
            time.sleep(_POLL_SECONDS)
        raise Unavailable(f"the server gave no token: {error}: {self.tail()}")

    def measure(self, plan: Sequence[Load]) -> dict[str, Any]:
        """Replay a plan and return its figures; see ``describe``."""
        self.thaw()
        figures = describe(asyncio.run(replay(self.port, self.model, plan)))
        self.freeze()
        print(f"  {self.name:18} {figures}", file=sys.stderr)
        return figures


async def _models(port: int) -> list[str]:
    """Return the names of the server's models; none while it does not answer."""
    status, body = await get(port, "/v1/models")
    try:
        return [entry["id"] for entry in json.loads(body)["data"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []
