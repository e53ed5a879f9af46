"""The AVX2 kernels on a processor that has nothing better, whatever this machine is.

The processor is Intel's Haswell, emulated by qemu-user: this interpreter and this library run on
it, so an instruction that AVX2 does not have ends the process. `make test-thorough` installs it
with apt-get where there is none.
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
from paceline.backends.native.single_kernels import PackedMatrix

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
EMULATOR = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.slow,
    # minutes: every instruction is translated
    pytest.mark.thorough,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
    pytest.mark.skipif("avx2" not in variants(), reason="this machine has no AVX2"),
    pytest.mark.skipif(
        EMULATOR is None, reason="needs qemu-user, an emulator (make test-thorough installs it)"
    ),
]

# without the fixtures of all tests, which load PyTorch; few examples of each property
TESTS = """
import sys
import pytest

class FewExamples:
    def pytest_configure(self):
        from hypothesis import HealthCheck, settings
        checks = list(HealthCheck)
        settings.register_profile(
            "emulated", deadline=None, max_examples=5, suppress_health_check=checks
        )
        settings.load_profile("emulated")

options = ["-p", "no:cacheprovider", "--noconftest", "-m", "", "-rs"]
sys.exit(pytest.main([*options, *sys.argv[1:]], plugins=[FewExamples()]))
"""
PRODUCTS = """
import sys
import numpy as np
from tests.backends.native.test_emulated import products
np.savez(sys.argv[1], **products())
"""


def emulated(code: str, *arguments: object) -> str:
    """What Python prints on the emulated processor."""
    # a limit of this process's environment might not run there
    environment = {key: value for key, value in os.environ.items() if key != "PACELINE_ISA"}
    # its threads take turns on as many processors as there are here
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    argv = [str(EMULATOR), "-cpu", "Haswell", sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def products() -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(3)
    found = {}
    for dtype in ("float32", "bfloat16", "int8", "q4"):
        weights = random.standard_normal((70, 192), dtype=np.float32)
        x = random.standard_normal((13, 192), dtype=np.float32)
        matrix = PackedMatrix(weights, dtype, isa="avx2")
        found[dtype] = matrix.multiply(x)
        found[dtype + " alone"] = matrix.multiply(x[:1])
    return found


def test_the_processor_has_nothing_better() -> None:
    code = "from paceline.backends.native import variants; print(*variants())"
    assert emulated(code).split() == ["avx2", "portable"]


@pytest.mark.timeout(900)
def test_kernels_pass_their_tests() -> None:
    names = ("matrix", "block_formats", "experts", "attention", "likeliest")
    out = emulated(TESTS, "-k", "avx2", *(FOLDER / f"test_{name}.py" for name in names))
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None and int(passed[1]) > 100, out[-2000:]


def test_the_same_numbers_as_the_level_gives_here(tmp_path: Path) -> None:
    emulated(PRODUCTS, tmp_path / "products.npz")
    with np.load(tmp_path / "products.npz") as stored:
        for name, expected in products().items():
            np.testing.assert_array_equal(stored[name], expected, err_msg=name)
