"""The benchmark of adapters: its folders are read, and its sums are of what was computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.adapters.steps import random_values, ratio, seconds, write_folder
from paceline.checkpoints.open import open_adapter
from tests.backends.native.reference import tiny_config


def test_a_written_folder_is_an_adapter(tmp_path: Path) -> None:
    config = tiny_config()
    values = random_values(config, 3)
    size = write_folder(tmp_path, values)
    file = open_adapter(tmp_path, config)
    assert size == 2 * file.num_values
    for (_, a, b), (pair, found_a, found_b) in zip(values.pairs, file.read().pairs, strict=True):
        assert pair.rank == 16
        # bfloat16 keeps 8 bits
        assert np.abs(found_a - a).max() <= np.abs(a).max() / 128
        assert np.abs(found_b - b).max() <= np.abs(b).max() / 128


def test_a_work_is_done_once_at_least_and_ratios_are_of_pairs() -> None:
    done = []
    assert seconds(lambda: done.append(1)) > 0
    assert len(done) == 1

    def slow() -> None:
        sum(range(20_000))

    def quick() -> None:
        sum(range(2_000))

    median, low, high = ratio(slow, quick, 0.002)
    assert low <= high
    assert median > 2
