"""What the machine can do at most, as far as it does not depend on how fast it is."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.native import unavailable_reason, variants
from paceline.backends.native.single_kernels import PackedMatrix, peak_rate, products_seconds
from paceline.errors import ConfigError

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

DTYPES = ("float32", "bfloat16", "int8", "q4")


@pytest.mark.parametrize("isa", [name for name in variants() if name.startswith("avx")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_instructions_have_a_peak(isa: str, dtype: str) -> None:
    # an order of magnitude below and above what a core of any speed reaches
    assert 1e8 < peak_rate(dtype, 1, isa) < 1e13


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_code_has_none(dtype: str) -> None:
    assert peak_rate(dtype, 1, "portable") == 0


def test_the_peak_of_a_variant_that_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="portable"):
        peak_rate("int8", 1, "mmx")


def test_products_of_several_matrices_are_timed() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 64), dtype=np.float32)
    matrices = [
        PackedMatrix(random.standard_normal((40, 64), dtype=np.float32), "int8") for _ in range(3)
    ]
    assert 0 < products_seconds(matrices, x) < 10
    matrices[2].close()
    with pytest.raises(ConfigError, match="closed"):
        products_seconds(matrices, x)
