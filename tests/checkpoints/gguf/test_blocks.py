"""Values of blocks are those that the ``gguf`` package reads, to the last bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from paceline.checkpoints.gguf.blocks import BLOCKS
from paceline.checkpoints.gguf.container import GGUFType


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_values_are_those_of_the_package(kind: GGUFType) -> None:
    size, decode = BLOCKS[kind]
    random = np.random.default_rng(int(kind))
    blocks = random.integers(0, 256, (40, size), np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
        ours = decode(blocks).reshape(theirs.shape)
    # halves of random bytes are also infinite, or no number
    known = np.isfinite(theirs) & (np.abs(theirs) < 1e30)
    assert known.mean() > 0.5 and np.isfinite(ours[known]).all()
    np.testing.assert_allclose(ours[known], theirs[known], rtol=1e-5, atol=1e-3)
