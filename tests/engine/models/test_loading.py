"""A load next to engines that compute: what it is told of them, and what they leave to it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.engine.models.loading import SLICE, Loading, _used, lacking
from paceline.engine.models.page import Page, Slot, make_page, read_uses
from paceline.engine.models.turn import Turn

_LOAD = """
import sys
from pathlib import Path
from paceline.engine.models.loading import Loading
with Loading(Path(sys.argv[1])):
    print("ready", flush=True)
    while sys.argv[2] == "works" or sys.stdin.readline():
        pass
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    make_page(tmp_path / "turns")
    return tmp_path / "turns"


def _loads(page: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(page), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_it_is_crowded_while_an_engine_computes(page: Path) -> None:
    with Loading(page) as loading:
        assert not loading.is_crowded()
        turn = Turn(page)
        turn.planned(0.001, math.inf, math.inf)
        with turn:
            assert loading.is_crowded()
        assert loading.is_crowded()
        # it is no engine, and takes no turn
        assert [use.pid for use in read_uses(page)] == [os.getpid()]
        turn.close()
        assert not loading.is_crowded()
        # one that was killed while it waited
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        Page(page, Slot(ended.pid, since=time.monotonic()))
        assert not loading.is_crowded()


def test_steps_leave_a_share_to_a_load_that_wants_a_processor_and_has_none(page: Path) -> None:
    process = _loads(page, "works")
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    engine = Page(page, Slot(os.getpid()))
    now = time.monotonic()
    assert not lacking(engine, now, is_due=False)
    # stopped it wants none
    assert not lacking(engine, now + 1.0, is_due=False)
    process.send_signal(signal.SIGCONT)
    # by a clock that is ahead, it ran less than a fifth of the time
    assert lacking(engine, now + 3.0, is_due=False)
    assert lacking(engine, now + 6.0, is_due=True), "it lacks the most that it may"
    process.kill()
    process.communicate()
    assert not lacking(engine, now + 20.0, is_due=False)
    assert not any(slot.loads for slot in engine.slots()), "its slot is free again"


def test_a_step_waits_a_slice_and_one_that_is_due_does_not(page: Path) -> None:
    process = _loads(page, "works")
    turn = Turn(page)
    # without a process
    ahead = Page(page, Slot())

    def step(due: float) -> float:
        (number,) = [n for n, slot in enumerate(ahead.slots()) if slot.loads]
        now, used = time.monotonic(), _used(process.pid)
        assert used is not None
        # as if it lacked half of what it may
        slot = ahead.slots()[number]._replace(seconds=0.05, active=now, used=used)
        ahead.set(number, slot)
        before = read_uses(page)[-1].waited_seconds
        turn.planned(0.001, due, math.inf)
        with turn:
            pass
        return read_uses(page)[-1].waited_seconds - before

    assert step(math.inf) >= SLICE
    assert step(time.monotonic()) < SLICE
    process.kill()
    process.communicate()
    turn.close()
