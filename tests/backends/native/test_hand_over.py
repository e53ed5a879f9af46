"""Steps that stop between layers, while others want the processors."""

from __future__ import annotations

import ctypes
import sys
import time

import numpy as np
import pytest

from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason
from tests.backends.native.reference import random_weights, rope_tables, tiny_config

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

LAYERS = 5


@pytest.fixture(params=[1, 2, 3])
def model(request: pytest.FixtureRequest) -> NativeModel:
    config = tiny_config(num_hidden_layers=LAYERS)
    settings = NativeSettings(dtype="int8", num_blocks=16, threads=request.param)
    weights = random_weights(config, np.random.default_rng(0))
    return NativeModel(config, weights.items(), rope_tables(config, 256), settings)


def _step(model: NativeModel, count: int) -> np.ndarray:
    rows = np.arange(count)
    blocks = np.arange(-(-count // 16))[None]
    return model.forward(rows, rows, np.array([0, count]), blocks, rows[-2:]).copy()


# few rows that the team shares out, and many of which each member takes its own
@pytest.mark.parametrize("count", [2, 100])
def test_a_step_stops_in_each_layer_and_computes_the_same(model: NativeModel, count: int) -> None:
    alone = _step(model, count)
    wanted, offers = ctypes.c_int64(1), 0

    def offer() -> None:
        nonlocal offers
        offers += 1
        time.sleep(0.002)

    assert model.hand_over(ctypes.addressof(wanted), offer, 0.0) == LAYERS
    assert np.array_equal(_step(model, count), alone)
    assert offers == LAYERS
    # nothing waits
    wanted.value = offers = 0
    assert np.array_equal(_step(model, count), alone)
    assert offers == 0


def test_offers_are_apart_and_what_they_raise_ends_no_step(
    model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: raised.append(each.exc_value))
    wanted, offers = ctypes.c_int64(1), 0

    def offer() -> None:
        nonlocal offers
        offers += 1
        wanted.value = offers < 2
        raise ValueError("not now")

    model.hand_over(ctypes.addressof(wanted), offer, 0.0)
    alone = _step(model, 2)
    # until nothing waits any more
    assert offers == len(raised) == 2
    wanted.value = 1
    model.hand_over(ctypes.addressof(wanted), offer, 60.0)
    assert np.array_equal(_step(model, 2), alone)
    assert offers == 2
