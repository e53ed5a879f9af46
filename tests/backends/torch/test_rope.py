"""How heads are turned; by how much is in tests/backends/runner/test_rope.py."""

from __future__ import annotations

import pytest
import torch

from paceline.backends.torch.attention import RotaryTable
from tests.backends.runner.test_rope import make_config


def test_rotation_of_one_pair() -> None:
    """Dimension 1 turns against dimension 5 by position * frequency[1]; lengths stay."""
    config = make_config()
    table = RotaryTable(config, 64, dtype=torch.float64, device=torch.device("cpu"))
    heads = torch.zeros(2, 1, 8, dtype=torch.float64)
    heads[:, 0, 1] = 2.0
    table.rotate_(heads, table.rows(torch.tensor([0, 5])))
    angle = torch.tensor(5 * 10000.0 ** (-2 / 8), dtype=torch.float64)
    assert heads[0, 0].tolist() == [0, 2.0, 0, 0, 0, 0, 0, 0]
    assert heads[1, 0, 1] == pytest.approx(float(2 * angle.cos()), abs=1e-6)
    assert heads[1, 0, 5] == pytest.approx(float(2 * angle.sin()), abs=1e-6)
    assert float(heads[1].norm()) == pytest.approx(2.0, abs=1e-6)
