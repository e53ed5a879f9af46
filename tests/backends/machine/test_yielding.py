"""Loads that yield: on a thread of their own, at the lowest priority while others compute."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.machine.yielding import at_once, yielding
from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason
from tests.backends.native.reference import random_weights, rope_tables, tiny_config

_needs_classes = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no idle class here")


def _class() -> int:
    return os.sched_getscheduler(threading.get_native_id())


def test_what_it_returns_and_raises_is_the_works() -> None:
    assert at_once(lambda: 3) == yielding(lambda: 3, is_crowded=lambda: False) == 3
    with pytest.raises(ValueError, match="no number"):
        yielding(lambda: int("no number"), is_crowded=lambda: True)


@_needs_classes
def test_only_the_load_is_lowered_and_only_where_others_compute() -> None:
    assert yielding(_class, is_crowded=lambda: False) == os.SCHED_OTHER
    assert yielding(_class, is_crowded=lambda: True) == os.SCHED_IDLE
    assert _class() == os.SCHED_OTHER


@_needs_classes
def test_a_load_is_lowered_with_its_threads_once_others_compute() -> None:
    crowded = False

    def load() -> tuple[int, list[int]]:
        nonlocal crowded
        seen: list[int] = []

        def work() -> None:
            while _class() != os.SCHED_IDLE and time.monotonic() < ends:
                time.sleep(0.005)
            seen.append(_class())

        ends = time.monotonic() + 20.0
        other = threading.Thread(target=work)
        other.start()
        crowded = True
        other.join()
        return _class(), seen

    assert yielding(load, is_crowded=lambda: crowded) == (os.SCHED_IDLE, [os.SCHED_IDLE])
    assert _class() == os.SCHED_OTHER


@_needs_classes
@pytest.mark.skipif(unavailable_reason() is not None, reason="no native library")
def test_what_was_loaded_at_low_priority_computes_at_the_callers() -> None:
    config = tiny_config()
    tasks = Path("/proc/self/task")
    before = {each.name for each in tasks.iterdir()}
    loaded: list[int] = []

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        loaded.append(_class())
        yield from random_weights(config, 1).items()

    model = NativeModel(
        config, tensors(), rope_tables(config, 64),
        NativeSettings(dtype="float32", num_blocks=2, threads=3),
        beside=partial(yielding, is_crowded=lambda: True),
    )  # fmt: skip
    assert loaded == [os.SCHED_IDLE]
    team = {each.name for each in tasks.iterdir()} - before
    assert len(team) == 2
    assert {os.sched_getscheduler(int(each)) for each in team} == {os.SCHED_OTHER}
    rows = np.arange(9)
    step = (rows, rows, np.array([0, 9]), np.array([[0]]), rows)
    assert np.isfinite(model.forward(*step)).all()
    model.close()
