"""Parts of a start."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import time
from pathlib import Path

import pytest

from paceline.backends.machine.cpu import trim_heap
from paceline.cli.serve.startup import Stages, process_age


def test_stages_follow_each_other(caplog: pytest.LogCaptureFixture) -> None:
    stages = Stages(0.5, 100.0)
    stages.done("import", 100.25)
    stages.done("build", 102.0)
    assert stages.total == 2.5
    with caplog.at_level(logging.INFO):
        stages.log(logging.getLogger("x"), "built")
    assert caplog.messages == ["built total=2.50 import=0.75 build=1.75"]


def test_process_age(tmp_path: Path) -> None:
    before = process_age()
    time.sleep(0.05)
    assert process_age() - before >= 0.04
    # pytest itself was started seconds, not days, ago
    assert 0 < before < 86_400
    assert process_age(stat=tmp_path / "nothing") >= 0.05


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
