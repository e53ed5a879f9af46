from __future__ import annotations

import threading
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.checkpoints.gguf.container import GGUFType
from paceline.quantize import rounding
from paceline.quantize.rounding import (
    GROUP,
    as_blocks,
    levels_of,
    output_error,
    round_matrix,
    round_nearest,
)

KINDS = (GGUFType.Q4_1, GGUFType.Q5_1)


@pytest.fixture(scope="module")
def case() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [48, 160], whose last block of columns is not full, and its inputs' moments."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 160, generator=random) * 0.05
    shared = torch.randn(400, 20, generator=random) @ torch.randn(20, 160, generator=random)
    inputs = shared + torch.randn(400, 160, generator=random)
    return weight, inputs.t() @ inputs


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_read_as_the_values(
    case: tuple[torch.Tensor, torch.Tensor], kind: GGUFType
) -> None:
    rounded = round_matrix(*case, levels_of(kind))
    read = gguf.quants.dequantize(as_blocks(rounded, kind), gguf.GGMLQuantizationType(kind))
    assert np.array_equal(read, rounded.values().numpy())
    assert rounded.codes.min() >= 0 and rounded.codes.max() <= levels_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_change_less_than_by_rounding_to_the_nearest(
    case: tuple[torch.Tensor, torch.Tensor], kind: GGUFType
) -> None:
    weight, moments = case
    levels = levels_of(kind)
    nearest = output_error(round_nearest(weight, levels).values(), weight, moments)
    compensated = output_error(
        round_matrix(weight, moments, levels, sweeps=0).values(), weight, moments
    )
    swept = output_error(round_matrix(weight, moments, levels).values(), weight, moments)
    assert compensated < nearest / 3
    assert swept < compensated * 0.9


def test_rows_are_shared_out_among_threads(
    case: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "_ROWS", 10)
    used, own = set(), torch.get_num_threads()
    search = rounding._search

    def noting(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        used.add((threading.get_ident(), torch.get_num_threads()))
        together.wait()
        return search(*arguments)

    alone = round_matrix(*case, 15)
    # six parts: a thread goes on only with another one
    together = threading.Barrier(2, timeout=30)
    monkeypatch.setattr(rounding, "_search", noting)
    shared = round_matrix(*case, 15, threads=2)
    for name in ("codes", "scales", "minimums"):
        assert torch.equal(getattr(alone, name), getattr(shared, name))
    assert len(used) == 2 and {threads for _, threads in used} == {1}
    assert torch.get_num_threads() == own


def test_a_sweep_makes_no_error_larger(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, moments = case
    damped = moments.clone()
    diagonal = damped.diagonal()
    diagonal.add_(0.67 * diagonal + diagonal.mean() * 0.01)
    errors = [
        output_error(round_matrix(weight, moments, 15, sweeps=sweeps).values(), weight, damped)
        for sweeps in range(5)
    ]
    assert errors == sorted(errors, reverse=True)


def test_equal_weights_and_columns_without_inputs() -> None:
    weight = torch.full((3, 2 * GROUP), 0.25)
    weight[1] = 0.0
    weight[2, :GROUP] = torch.linspace(-1, 1, GROUP)
    moments = torch.zeros(2 * GROUP, 2 * GROUP)
    moments[:GROUP, :GROUP] = torch.eye(GROUP)
    values = round_matrix(weight, moments, 15).values()
    assert torch.equal(values[:2], weight[:2])
    assert (values[2] - weight[2]).abs().max() <= 1.1 / 15


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    weight, moments = torch.zeros(2, GROUP), torch.eye(GROUP)
    for broken in (weight, moments):
        broken[1, 3] = bad
        with pytest.raises(ValueError, match="not finite"):
            round_matrix(weight, moments, 15)
        broken[1, 3] = 0.0
