"""Memory of the C library's heap."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from paceline.cli.serve.heap import trim_heap


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not trim")
def test_what_was_freed_goes_back_to_the_system() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    # small enough for the heap, whose end the last one keeps where it is
    blocks = [library.malloc(60_000) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, 60_000)
    for block in blocks[:-1]:
        library.free(block)
    before = resident()
    trim_heap()
    assert before - resident() > 50 << 20
    library.free(blocks[-1])
