"""Kernels for instructions that few machines have, with plain C++ in the place of those.

A library of its own is compiled, which any processor with AVX2 runs. The kernels' tests run on it,
and where the machine has the instruction, its numbers are the instruction's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.backends.native import unavailable_reason, variants
from paceline.backends.native.build import build
from paceline.backends.native.single_kernels import PackedMatrix

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    # half a minute to compile; the kernels are those of the other tests but for the stand-ins
    pytest.mark.thorough,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
    pytest.mark.skipif("avx2" not in variants(), reason="this machine has no AVX2"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no compiler"),
]

# the library of the first argument in place of the package's, then what follows
USING = """
import sys
from pathlib import Path
from paceline.backends.native import library
library._PATH = Path(sys.argv[1])
"""
TESTS = (
    USING
    + """
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "-k", "avxvnni or random", *sys.argv[2:]]))
"""
)
PRODUCTS = (
    USING
    + """
import numpy as np
from tests.backends.native.test_stand_ins import products
np.savez(sys.argv[2], **products())
"""
)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(target=tmp_path_factory.mktemp("stand_ins"), options=["-DPACELINE_STAND_INS=ON"])


def run(code: str, *arguments: object) -> str:
    # a limit of this process's environment would not know the other library's levels
    environment = {key: value for key, value in os.environ.items() if key != "PACELINE_ISA"}
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def products() -> dict[str, NDArray[np.float32]]:
    """Of the largest bytes there are, and of random ones."""
    random = np.random.default_rng(3)
    found = {}
    for dtype in ("int8", "q4"):
        weights = random.standard_normal((70, 192), dtype=np.float32)
        x = random.standard_normal((13, 192), dtype=np.float32)
        weights[:2], x[:2] = 1, 1
        matrix = PackedMatrix(weights, dtype, isa="avxvnni")
        found[dtype] = matrix.multiply(x)
        found[dtype + " alone"] = matrix.multiply(x[:1])
    return found


def test_kernels_of_stand_ins_pass_the_kernels_tests(stand_ins: Path) -> None:
    names = ("test_matrix", "test_attention", "test_likeliest")
    out = run(TESTS, stand_ins, *(FOLDER / f"{name}.py" for name in names))
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None and int(passed[1]) > 80, out[-2000:]


@pytest.mark.skipif("avxvnni" not in variants(), reason="this machine has no AVX-VNNI")
def test_a_stand_in_computes_what_the_instruction_does(stand_ins: Path, tmp_path: Path) -> None:
    run(PRODUCTS, stand_ins, tmp_path / "products.npz")
    with np.load(tmp_path / "products.npz") as stored:
        for name, expected in products().items():
            np.testing.assert_array_equal(stored[name], expected)
