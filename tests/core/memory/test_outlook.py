"""Future memory against brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import CacheConfig
from paceline.core.memory.outlook import MemoryOutlook, future_peak
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepTimeModel
from paceline.core.request import Request
from tests.driving import make_request


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=12))
def test_future_peak_is_what_stepping_finds(sequences: list[tuple[int, int]]) -> None:
    peak = 0
    for step in range(51):
        alive = [(now, to_come) for now, to_come in sequences if to_come >= step]
        peak = max(peak, sum(now + step for now, _ in alive))
    assert future_peak(sorted((-to_come, now) for now, to_come in sequences)) == peak


def outlook(running: list[Request], num_held_blocks: int) -> MemoryOutlook:
    work = WorkEstimator(StepTimeModel(), LengthHistory())
    return MemoryOutlook(running, work, CacheConfig(block_size=4, num_blocks=40), num_held_blocks)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_an_outlook_may_be_told_later_what_is_held(
    running: list[tuple[int, int]], waiting: list[tuple[int, int]], before: int, held: int
) -> None:
    requests = [make_request(f"r{i}", *sizes) for i, sizes in enumerate(running)]
    kept, fresh = outlook(requests, before), outlook(requests, held)
    kept.admits(make_request("first", *waiting[0]), 0)
    kept.hold(held)
    for index, sizes in enumerate(waiting):
        newcomer = make_request(f"w{index}", *sizes)
        admitted = fresh.admits(newcomer, 0)
        assert kept.admits(newcomer, 0) == admitted
        if admitted:
            fresh.add(newcomer, 0)
            kept.add(newcomer, 0)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=4),
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=2, max_size=12
    ),
)
def test_whoever_is_asked_about_after_others_gets_the_same_answer(
    running: list[tuple[int, int]], waiting: list[tuple[int, int, bool]]
) -> None:
    requests = [make_request(f"r{i}", *sizes) for i, sizes in enumerate(running)]
    # nobody shares blocks
    held = 1000
    kept = outlook(requests, held)
    # of more than there is memory: what each holds has to be looked at
    kept.admits(make_request("large", 100, 100), 0)
    admitted: list[Request] = []
    for index, (*sizes, has_room) in enumerate(waiting):
        newcomer = make_request(f"w{index}", *sizes)
        fresh = outlook([*requests, *admitted], held)
        admits = fresh.admits(newcomer, 0)
        assert kept.admits(newcomer, 0) == admits
        if admits and has_room:
            kept.add(newcomer, 0)
            admitted.append(newcomer)
