"""What setup.py puts into a wheel, with a stub of CMake. The whole of it is `make test-wheel`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools.command.bdist_wheel")

ROOT = Path(__file__).parent.parent
LIBRARY = "paceline/backends/native/_lib.so"
# a library that asks for glibc 2.33
CMAKE = r"""#!/bin/sh
[ "$1" != --build ] || printf '\177ELF%14s\076\000GLIBC\000GLIBC_2.33\000' "" > "$2/_lib.so"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A few files of this one, and a library of the checkout's own, which must not be taken."""
    folder = tmp_path / "checkout"
    (folder / LIBRARY).parent.mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc/CMakeLists.txt",
                 "paceline/__init__.py", "paceline/backends/native/__init__.py",
                 "paceline/backends/native/build.py", "paceline/backends/__init__.py"):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    (folder / LIBRARY).write_text("the checkout's")
    (tmp_path / "bin").mkdir()
    return folder


def make_wheel(checkout: Path, kernels: str = "auto") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", "dist"],
        cwd=checkout,
        env=os.environ | {"PATH": str(checkout.parent / "bin"), "PACELINE_KERNELS": kernels},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def has_library(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "paceline/__init__.py" in names, names
        return LIBRARY in names


def test_a_wheel_holds_the_kernels_and_names_their_glibc(checkout: Path) -> None:
    cmake = checkout.parent / "bin" / "cmake"
    cmake.write_text(CMAKE)
    cmake.chmod(0o755)
    done = make_wheel(checkout, "required")
    assert done.returncode == 0, done.stderr
    (wheel,) = (checkout / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-manylinux_2_33_x86_64.whl")
    assert has_library(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(LIBRARY).startswith(b"\x7fELF")
        (record,) = [name for name in archive.namelist() if name.endswith("RECORD")]
        assert LIBRARY in archive.read(record).decode()


def test_without_a_compiler_the_wheel_says_so(checkout: Path) -> None:
    done = make_wheel(checkout)
    assert done.returncode == 0, done.stderr
    assert "paceline: installed without native kernels: cmake was not found" in done.stderr
    assert "pip install 'paceline[torch]'" in done.stderr
    (wheel,) = (checkout / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl") and not has_library(wheel)


def test_kernels_are_required_or_left_out_on_demand(checkout: Path) -> None:
    done = make_wheel(checkout, "required")
    assert done.returncode == 1 and "paceline: cmake was not found" in done.stderr
    assert make_wheel(checkout, "off").stderr.count("kernels") == 0
    (wheel,) = (checkout / "dist").iterdir()
    assert not has_library(wheel)
    assert "PACELINE_KERNELS is auto" in make_wheel(checkout, "of").stderr
