"""Worker processes of peers."""

from __future__ import annotations

import json
import os
import selectors
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Command, Process, Unavailable
from benchmarks.peers.jobs import Done, Job

__all__ = ["Worker"]


class Worker(Process):
    """A process that answers jobs; see ``jobs.serve``.

    ``about`` is its own report. It is loaded when the constructor returns.

    Raises Unavailable when the engine does not load.
    """

    def __init__(self, command: Command, log: Path) -> None:
        super().__init__(command, log, pipes=True)
        self._buffer = b""
        try:
            self.about: dict[str, Any] = self._receive(command.start_seconds)["ready"]
        except BaseException:
            self.close()
            raise

    def run(self, job: Job, timeout: float = 600.0) -> Done:
        """Do a job. Raises Unavailable when the worker fails or takes longer than ``timeout``
        seconds; it must not be used after that."""
        assert self._process.stdin is not None
        self.thaw()
        try:
            self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Unavailable(f"the worker is gone: {self.tail()}") from None
        answer = self._receive(timeout)
        done = Done(answer["seconds"], answer["output_tokens"])
        expected = job.max_tokens * len(job.prompts)
        if done.output_tokens != expected:
            raise Unavailable(f"asked for {expected} output tokens, got {done.output_tokens}")
        return done

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Unavailable(f"no answer within {timeout:.0f} s: {self.tail()}")
                data = os.read(pipe, 1 << 16)
                if not data:
                    raise Unavailable(f"the worker ended: {self.tail()}")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(str(answer["error"]).strip().splitlines()[-1])
        return answer
