"""What benchmarks start ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.processes import Command, Process, Unavailable
from tests.server.live_process import eventually

_FREEZES = """
import sys, time
from pathlib import Path
from benchmarks.common.processes import Command, Process

with Process(Command(("sleep", "300")), Path(sys.argv[1])) as started:
    started.freeze()
    print(started.pid, flush=True)
    time.sleep(300)
"""


def test_a_frozen_process_does_not_outlive_a_benchmark_that_is_told_to_end(tmp_path: Path) -> None:
    command = (sys.executable, "-c", _FREEZES, str(tmp_path / "log"))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        frozen = int(benchmark.stdout.readline())
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(20) == 128 + signal.SIGTERM

    def is_gone() -> bool:
        try:
            os.kill(frozen, 0)
        except ProcessLookupError:
            return True
        return False

    eventually(is_gone)


def test_sigterm_does_what_it_did_before_once_all_are_closed(tmp_path: Path) -> None:
    def handler() -> object:
        return signal.getsignal(signal.SIGTERM)

    sleep, log = Command(("sleep", "300")), tmp_path / "log"
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Process(sleep, log):
            with Process(sleep, log):
                assert handler() is not signal.SIG_DFL
            assert handler() is not signal.SIG_DFL
        assert handler() is signal.SIG_DFL
        with pytest.raises(Unavailable):
            Process(Command(("/nowhere",)), log)
        assert handler() is signal.SIG_DFL
        # one that is the caller's own
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with Process(sleep, log) as ignoring:
            assert handler() is signal.SIG_IGN
            # it ignores the signal too, which it has from this process
            ignoring.close(grace=0.1)
        assert handler() is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
