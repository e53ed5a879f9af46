"""Where the system grants less than was asked for: an error, not the end of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.backends.native import NativeModel, NativeSettings, unavailable_reason
from paceline.errors import ConfigError
from tests.backends.native.reference import random_weights, rope_tables, tiny_config

pytestmark = [
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
    pytest.mark.skipif(sys.platform != "linux", reason="needs limits on a process's memory"),
]

PREFACE = """
import resource
from pathlib import Path

import numpy as np

from paceline.backends.native import NativeModel, NativeSettings
from paceline.errors import ConfigError
from tests.backends.native.reference import random_weights, rope_tables, tiny_config

MOST = resource.getrlimit(resource.RLIMIT_AS)[1]


def allow(more):
    '''No more address space than what is taken now and so many bytes.'''
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, MOST))


def make(config, weights, threads):
    return NativeModel(config, weights, rope_tables(config, 16),
                       NativeSettings(dtype="float32", num_blocks=1, threads=threads))
"""

THREADS = """
config = tiny_config()
weights = random_weights(config, 0)
# a thread takes some megabytes for its stack, and the first matrix 256 of address space
allow(512 << 20)
try:
    make(config, weights.items(), 1000)
except ConfigError as error:
    print(error)
model = make(config, weights.items(), 2)
"""

PACKING = """
# 32 rows of a million floats are turned at once: 128 MiB for each thread, and enough for one
config = tiny_config(num_hidden_layers=1, intermediate_size=1 << 20, hidden_size=16)
tensor = np.zeros((16, 1 << 20), dtype=np.float32)


def tensors():
    allow(192 << 20)
    yield "model.layers.0.mlp.down_proj.weight", tensor


for threads in (2, 3):
    try:
        make(config, tensors(), threads)
    except ConfigError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))
"""


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PREFACE + script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()


def test_threads_that_do_not_start() -> None:
    (message,) = run(THREADS)
    assert message.startswith("could start only ")
    assert "threads beside the caller's, not 999: " in message


def test_memory_that_packing_does_not_get() -> None:
    assert run(PACKING) == ["out of memory"] * 2


@pytest.mark.parametrize(
    ("num_blocks", "message"),
    [
        # 2 layers, keys and values of 32 floats for 16 positions
        (2**34, r"no memory for 17179869184 KV blocks of 8192 bytes each"),
        (2**51, r"2251799813685248 KV blocks of 8192 bytes each are more than memory can be"),
        # 2^13 * 2^51 is 0 in 64 bits, and this a single block
        (2**51 + 1, "more than memory can be"),
        (2**64 + 1, "9223372036854775807 KV blocks"),
    ],
)
def test_a_cache_larger_than_memory(num_blocks: int, message: str) -> None:
    config = tiny_config()
    with pytest.raises(ConfigError, match=message):
        NativeModel(
            config,
            random_weights(config, 0).items(),
            rope_tables(config, 16),
            NativeSettings(dtype="float32", num_blocks=num_blocks, threads=1),
        )
