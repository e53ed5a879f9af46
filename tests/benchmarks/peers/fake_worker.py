"""A worker for tests: ``python -m tests.benchmarks.peers.fake_worker MODE [RECORD]``.

Tokens take no time; seconds are the number of prompts. MODE: "ok"; "short" gives a token too few;
"refuse" does not load; "spin" keeps a core busy in a child process; "hang" never answers; "fail"
raises at prompts of 13 tokens. Every job is written to RECORD as "PID DIGEST COUNT", where DIGEST
is that of the prompts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from benchmarks.peers.jobs import Done, Job, serve


class _Fake:
    def __init__(self, mode: str, record: Path | None) -> None:
        self._mode = mode
        self._record = record

    def run(self, job: Job) -> Done:
        print("engines print to standard output")
        if self._mode == "hang":
            time.sleep(60)
        if self._mode == "fail" and len(job.prompts[0]) == 13:
            raise RuntimeError("13 is too many")
        if self._record is not None:
            with self._record.open("a") as file:
                digest = zlib.crc32(repr(job.prompts).encode())
                file.write(f"{os.getpid()} {digest} {len(job.prompts)}\n")
        tokens = job.max_tokens * len(job.prompts) - (self._mode == "short")
        return Done(float(len(job.prompts)), tokens)


def _load() -> tuple[_Fake, dict[str, Any]]:
    mode = sys.argv[1]
    record = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    if mode == "refuse":
        raise OSError("no such model: 42")
    if mode == "spin":
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
    return _Fake(mode, record), {"version": "7"}


if __name__ == "__main__":
    serve(_load)
