"""When make compiles the native kernels, played by a stub of the environment's python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

PYTHON = """#!/bin/sh
echo "$*" >> log
case "$*" in
*native.build) {build} ;;
esac
"""
BUILT = "touch paceline/backends/native/_lib.so"


class Checkout:
    """A checkout whose environment is installed."""

    def __init__(self, root: Path, build: str) -> None:
        self.root = root
        self.library = root / "paceline" / "backends" / "native" / "_lib.so"
        shutil.copyfile(MAKEFILE, root / "Makefile")
        for name, time in (
            ("pyproject.toml", 1000),
            ("constraints.txt", 1000),
            ("scripts/make-venv", 1000),
            ("csrc/api.cpp", 1000),
            ("csrc/model.h", 1000),
            ("paceline/backends/native/build.py", 1000),
            (".venv/.installed", 2000),
        ):
            self.touch(name, time)
        for name in ("python", "paceline"):
            program = root / ".venv" / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(PYTHON.format(build=build))
            program.chmod(0o755)

    def touch(self, name: str, time: int) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (time, time))

    def make(self, target: str) -> tuple[list[str], str]:
        """What was run, and what was said of it."""
        (self.root / "log").unlink(missing_ok=True)
        done = subprocess.run(
            ["make", target],
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=20,
            env={"PATH": os.environ["PATH"]},
        )
        assert done.returncode == 0, done.stderr
        return (self.root / "log").read_text().splitlines(), done.stderr


def built(lines: list[str]) -> bool:
    return any(line.endswith("native.build") for line in lines)


def test_kernels_are_compiled_when_their_sources_change(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, BUILT)
    lines, _ = checkout.make("serve")
    assert built(lines[:1])
    assert lines[1].startswith("serve")
    assert not built(checkout.make("serve")[0])
    for source in ("csrc/model.h", "csrc/fresh.cpp", "paceline/backends/native/build.py"):
        os.utime(checkout.library, (3000, 3000))
        checkout.touch(source, 4000)
        assert built(checkout.make("serve")[0]), source
        checkout.touch(source, 1000)
    # a new environment needs no other library
    checkout.touch(".venv/.installed", 2**31)
    assert not built(checkout.make("serve")[0])
    checkout.library.unlink()
    assert built(checkout.make("venv")[0])


def test_without_a_compiler_it_goes_on(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "exit 1")
    for _ in range(2):
        lines, said = checkout.make("serve")
        assert built(lines[:1])
        assert lines[1].startswith("serve")
        assert "--compute torch serves" in said


def test_clean_removes_what_was_compiled(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, BUILT)
    checkout.make("venv")
    assert checkout.library.exists()
    for folder in ("tests", "benchmarks"):
        (tmp_path / folder).mkdir()
    subprocess.run(["make", "clean"], cwd=tmp_path, capture_output=True, check=True)
    assert not checkout.library.exists()


def test_clean_venv_deletes_environments_only(tmp_path: Path) -> None:
    Checkout(tmp_path, BUILT)
    for folder in ("tests", "benchmarks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "home" / "letters").mkdir(parents=True)
    done = subprocess.run(
        ["make", "clean-venv", "VENV=home"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "home is no virtual environment, so it stays" in done.stderr
    assert (tmp_path / "home" / "letters").is_dir()
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    for _ in range(2):
        subprocess.run(["make", "clean-venv"], cwd=tmp_path, capture_output=True, check=True)
        assert not (tmp_path / ".venv").exists()
