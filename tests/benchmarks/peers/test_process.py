from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.processes import Command, Process, Unavailable
from benchmarks.peers.jobs import Done, Job
from benchmarks.peers.process import Worker

JOB = Job([[1, 2], [3, 4]], 5)


def fake(*arguments: str, start_seconds: float = 60.0) -> Command:
    return Command(
        (sys.executable, "-m", "tests.benchmarks.peers.fake_worker", *arguments),
        start_seconds=start_seconds,
    )


def test_a_worker_answers_jobs_whatever_its_engine_prints(tmp_path: Path) -> None:
    worker = Worker(fake("ok"), tmp_path / "log")
    try:
        assert worker.about == {"version": "7"}
        assert worker.run(JOB) == Done(2.0, 10)
        assert worker.run(Job([[1]] * 3, 1)) == Done(3.0, 3)
    finally:
        worker.close()
    assert "engines print" in (tmp_path / "log").read_text()


def test_what_goes_wrong_says_what(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no such model: 42"):
        Worker(fake("refuse"), tmp_path / "log")
    with pytest.raises(Unavailable, match="no-such-python"):
        Worker(Command(("no-such-python",)), tmp_path / "log")
    with pytest.raises(Unavailable, match="the worker ended"):
        Worker(Command((sys.executable, "-c", "pass")), tmp_path / "log")
    with pytest.raises(Unavailable, match="no answer within 0 s"):
        Worker(fake("ok", start_seconds=0.01), tmp_path / "log")


@pytest.mark.parametrize(
    ("mode", "message"),
    [("short", "asked for 10 output tokens, got 9"), ("hang", "no answer within 0 s")],
)
def test_an_answer_that_is_not_one(tmp_path: Path, mode: str, message: str) -> None:
    worker = Worker(fake(mode), tmp_path / "log")
    try:
        with pytest.raises(Unavailable, match=message):
            worker.run(JOB, timeout=0.2 if mode == "hang" else 60.0)
    finally:
        worker.close()


def test_freezing_stops_what_a_worker_started_too(tmp_path: Path) -> None:
    worker = Worker(fake("spin"), tmp_path / "log")
    try:
        spent = worker.cpu_seconds()
        deadline = time.monotonic() + 30
        while worker.cpu_seconds() < spent + 0.05:
            assert time.monotonic() < deadline, "the child should spin"
            time.sleep(0.01)
        worker.freeze()
        time.sleep(0.05)
        assert worker.idle_share(0.3) == 0.0
        # asking thaws it
        assert worker.run(JOB) == Done(2.0, 10)
        assert worker.peak_rss_mb() > 5
    finally:
        worker.close()


def test_closing_ends_the_whole_session(tmp_path: Path) -> None:
    """Also what is frozen, and what ignores being asked."""
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log"
    process = Process(Command((sys.executable, "-c", script)), log)
    deadline = time.monotonic() + 30
    while not log.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = int(log.read_text())
    process.freeze()
    process.close(grace=0.1)
    assert not process.alive
    while _runs(child):
        assert time.monotonic() < deadline, "the child outlived its session"
        time.sleep(0.01)
    process.close()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ProcessLookupError):
        return False
    return state not in ("Z", "X")
