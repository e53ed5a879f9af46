"""The turn between processes: one computes at a time, by weight; death and hanging pass it on."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.slo import Slo
from paceline.engine.models.arbiter import Contender, choose_turn, longest_step
from paceline.engine.models.page import Page, Slot, make_page, read_uses
from paceline.engine.models.turn import Turn
from paceline.engine.testing import null_core
from tests.driving import make_request

Steps = list[tuple[float, float]]


def _start(page: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.models.turn_engine", str(page), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _run(processes: list[subprocess.Popen[str]]) -> list[Steps]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = []
    for process in processes:
        out, _ = process.communicate(timeout=60)
        found.append([(float(a), float(b)) for a, b in (each.split() for each in out.splitlines())])
    return found


def _overlaps(one: Steps, other: Steps) -> int:
    return sum(a < d and c < b for a, b in one for c, d in other)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    make_page(tmp_path / "turns")
    return tmp_path / "turns"


def test_one_computes_at_a_time_and_both_get_on(page: Path) -> None:
    processes = [_start(page, "0.01", "30"), _start(page, "0.01", "30")]
    one, other = _run(processes)
    assert len(one) == len(other) == 30
    assert _overlaps(one, other) == 0
    # neither waits for the end of the other
    assert one[0][0] < other[-1][0] and other[0][0] < one[-1][0]


def test_what_is_used_goes_by_weight(page: Path) -> None:
    processes = [_start(page, "0.01", "40", "3"), _start(page, "0.01", "40", "1")]
    heavy, light = _run(processes)
    assert _overlaps(heavy, light) == 0
    # while both computed, from the first step of the later
    begun = max(heavy[0][0], light[0][0])
    ended = heavy[-1][1]
    counts = [sum(begun <= a < ended for a, _ in steps) for steps in (heavy, light)]
    assert counts[0] >= 2 * counts[1] > 0


@pytest.mark.parametrize("end", ["die", "hang"])
def test_a_holder_that_ends_or_hangs_keeps_no_other(page: Path, end: str) -> None:
    bad, good = _start(page, "0.01", "30", "1", end), _start(page, "0.01", "30")
    for process in (bad, good):
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    out, _ = good.communicate(timeout=60)
    assert len(out.splitlines()) == 30
    bad.send_signal(signal.SIGKILL)
    bad.communicate(timeout=60)


def test_an_engine_that_hangs_is_counted_as_passed_over(page: Path) -> None:
    holder = Turn(page)
    waiting = Turn(page)
    holder.planned(0.001, math.inf, math.inf)
    holder.__enter__()
    with waiting:
        # after half a second it computes without
        assert sum(use.overruns for use in read_uses(page)) == 1
    holder.__exit__(None, None, None)
    waiting.close()
    assert len(read_uses(page)) == 1
    holder.close()


def test_an_engine_that_is_stopped_while_it_waits_is_passed_over_once(page: Path) -> None:
    good = Turn(page)
    # it has used less, waits for longer and is late: it would have each turn
    began = time.monotonic()
    stopped = Page(page, Slot(os.getpid(), since=began, due=began))
    for _ in range(3):
        good.planned(0.001, math.inf, math.inf)
        with good:
            pass
    assert [use.overruns for use in read_uses(page)] == [1, 0]
    assert stopped.slots()[stopped.me].since == 0.0
    good.close()


def test_an_engine_that_was_passed_over_while_it_waited_waits_again(page: Path) -> None:
    holder, late = Turn(page), Turn(page)
    view = Page(page, Slot())
    holder.__enter__()
    thread = threading.Thread(target=late.__enter__)
    thread.start()
    while not any(slot.since for slot in view.slots()):
        time.sleep(0.001)
    with view.locked():
        for number, slot in enumerate(view.slots()):
            view.set(number, slot._replace(since=0.0))
    while not any(slot.since for slot in view.slots()):
        time.sleep(0.001)
    holder.__exit__(None, None, None)
    thread.join(0.4)
    assert not thread.is_alive()
    late.__exit__(None, None, None)
    holder.close()
    late.close()


def test_an_engine_that_is_stopped_with_the_page_locked_keeps_no_other(page: Path) -> None:
    turn = Turn(page)
    stopped = os.open(page, os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    with turn:
        pass
    (use,) = read_uses(page)
    assert use.pid == os.getpid()
    os.close(stopped)
    turn.close()


def test_neighbours_are_those_that_compute_lately(page: Path) -> None:
    one, other = Turn(page), Turn(page)
    now = time.monotonic()
    assert one.neighbours(now) == (0.0, math.inf)
    other.planned(0.004, math.inf, 0.1)
    with other:
        away, longest = one.neighbours(time.monotonic())
    # nothing was waited for yet: a step of the other
    assert away == pytest.approx(0.004)
    assert longest == pytest.approx(0.9 * 0.1 - 0.004)
    assert one.neighbours(time.monotonic() + 2.0) == (0.0, math.inf)
    assert other.neighbours(time.monotonic()) == (0.0, math.inf)
    one.close()
    other.close()


def test_a_place_is_free_again_after_its_engine(page: Path) -> None:
    for _ in range(300):
        Turn(page).close()
    assert read_uses(page) == []


def test_a_step_lends_the_turn_to_one_that_would_be_late_and_goes_on(page: Path) -> None:
    large, small = Turn(page), Turn(page)
    backend = _Sliced(slices=10)
    large.serve(backend)
    large.planned(1.0, math.inf, math.inf)
    with large as lent:
        assert not backend.wanted.value
        # nobody else is there
        large.offer()
        due = time.monotonic() + 0.05
        small.planned(0.01, due, 0.1)
        order: list[str] = []

        def compute() -> None:
            with small:
                order.append("small")
                time.sleep(0.03)

        thread = threading.Thread(target=compute)
        thread.start()
        while not backend.wanted.value:
            time.sleep(0.001)
        assert order == []
        backend.offer()
        order.append("large")
        assert order == ["small", "large"]
        assert 0.03 <= lent() < 1.0
        thread.join()
        assert not backend.wanted.value
        # a step of it may be as long as its slices leave the small one's pace
        assert large.neighbours(time.monotonic())[1] == pytest.approx(5 * (0.9 * 0.1 - 0.01))
    large_use, small_use = read_uses(page)
    assert large_use.waited_seconds >= 0.03 > small_use.waited_seconds - 0.5
    assert small_use.used_seconds >= 0.03
    large.close()
    small.close()


def test_a_step_keeps_the_turn_for_one_that_is_early_and_has_used_more(page: Path) -> None:
    large, small = Turn(page), Turn(page)
    backend = _Sliced(slices=10)
    large.serve(backend)
    with large:
        pass
    with small:
        time.sleep(0.05)
    large.planned(1.0, math.inf, math.inf)
    with large as lent:
        thread = threading.Thread(target=small.__enter__)
        thread.start()
        while not backend.wanted.value:
            time.sleep(0.001)
        backend.offer()
        assert lent() < 0.01 and backend.wanted.value
    thread.join()
    small.__exit__(None, None, None)
    large.close()
    small.close()


class _Sliced:
    """A backend whose steps can stop."""

    def __init__(self, slices: int) -> None:
        self._slices = slices

    def take_turns(self, turn: AbstractContextManager[Callable[[], float]]) -> None:
        self.turn = turn

    def hand_over(self, wanted: int, offer: Callable[[], None], slice_s: float) -> int:
        self.wanted = ctypes.c_int64.from_address(wanted)
        self.offer = offer
        return self._slices


class _Neighbours:
    """Processors with a busy neighbour; counts what a core says, and its turns."""

    def __init__(self) -> None:
        self.plans: list[tuple[float, float, float]] = []
        self.turns = 0
        self.has_turn = False

    def neighbours(self, now: float) -> tuple[float, float]:
        return 0.03, 0.05

    def planned(self, seconds: float, due: float, tightest_tpot: float) -> None:
        self.plans.append((seconds, due, tightest_tpot))

    def __enter__(self) -> Callable[[], float]:
        assert not self.has_turn
        self.turns, self.has_turn = self.turns + 1, True
        return lambda: 0.0

    def __exit__(self, *_: object) -> None:
        self.has_turn = False


@pytest.mark.parametrize("step_time", [0.0, 0.001])
def test_a_core_computes_each_step_in_a_turn_and_its_scheduler_knows_others(
    step_time: float,
) -> None:
    backend, shared = NullBackend(vocab_size=997, step_time=step_time), _Neighbours()
    core = null_core(backend)
    backend.take_turns(shared)
    core.turn = shared
    core.add_request(make_request("r", 8, 4, slo=Slo(tpot=0.2)))
    tokens = 0
    while core.has_work:
        tokens += sum(len(update.new_token_ids) for update in core.step())
    assert tokens == 4 and core.num_steps == shared.turns == len(shared.plans)
    assert (core.scheduler.state.chunk.away_s, core.scheduler.state.chunk.longest_s) == (0.03, 0.05)
    # the first token's step has no pace yet
    assert {tightest for *_, tightest in shared.plans} <= {0.2, math.inf}
    assert 0.2 in {tightest for *_, tightest in shared.plans}
    core.close()


def test_the_turn_goes_to_who_would_be_late_then_to_who_used_least() -> None:
    idle = Contender(slot=0, since=1.0, seconds=0.1, used=5.0)
    assert choose_turn([], 0.0) is None
    assert choose_turn([idle], 0.0) == 0
    assert choose_turn([idle, Contender(slot=1, since=2.0, used=4.0)], 3.0) == 1
    heavy = Contender(slot=2, since=2.0, used=8.0, weight=4.0)
    assert choose_turn([idle, heavy], 3.0) == 2
    # one more step of the other, of 0.1 s, and it would be late
    late = Contender(slot=3, since=2.0, used=99.0, seconds=0.02, due=3.11)
    assert choose_turn([idle, late], 3.0) == 3
    early = Contender(slot=3, since=2.0, used=99.0, seconds=0.02, due=3.2)
    assert choose_turn([idle, early], 3.0) == 0
    sooner = Contender(slot=4, since=2.5, used=99.0, seconds=0.02, due=3.05)
    assert choose_turn([idle, late, sooner], 3.0) == 4
    # one that can stop after 0.01 s leaves the late one its time
    sliced = Contender(slot=0, since=1.0, seconds=0.1, slice=0.01, used=5.0)
    assert choose_turn([sliced, late], 3.0) == 0
    assert choose_turn([sliced, late], 3.09) == 3


def test_a_neighbour_leaves_the_pace_of_targets() -> None:
    assert longest_step(0.01, 0.1) == pytest.approx(0.08)
    assert longest_step(0.01, math.inf) == pytest.approx(0.05)
    assert longest_step(0.1, math.inf) == pytest.approx(0.3)
    # a target that cannot be met asks for no more than its own step
    assert longest_step(0.1, 0.05) == pytest.approx(0.1)
