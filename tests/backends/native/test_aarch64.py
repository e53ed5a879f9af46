"""The library cross-compiled for aarch64, loaded by a C program in an emulator. That its kernels
compute what the others do is not tested here: no Python for aarch64 is at hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.backends.native.build import build, platform_tag
from paceline.backends.native.library import ABI

ROOT = Path(__file__).parents[3]
CROSS = "aarch64-linux-gnu-g++"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in (CROSS, "qemu-aarch64", "cmake")),
        reason="needs g++-aarch64-linux-gnu, qemu-user and cmake",
    ),
]

# answers as ctypes would: by name alone
PROGRAM = """
#include <dlfcn.h>
#include <cstdio>
int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::puts(dlerror()), 1;
  auto abi = reinterpret_cast<int (*)()>(dlsym(library, "paceline_abi"));
  auto variants = reinterpret_cast<const char* (*)()>(dlsym(library, "paceline_variants"));
  std::printf("%d %s", abi(), variants());
}
"""


def test_the_library_loads_on_aarch64(tmp_path: Path) -> None:
    toolchain = ROOT / "scripts" / "aarch64.cmake"
    library = build(ROOT / "csrc", tmp_path, [f"-DCMAKE_TOOLCHAIN_FILE={toolchain}"])
    tag = platform_tag(library)
    assert tag.startswith("manylinux_2_") and tag.endswith("_aarch64")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    subprocess.run([CROSS, "main.cpp", "-o", "main", "-ldl"], cwd=tmp_path, check=True)
    command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "./main", str(library)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{ABI} portable", done
