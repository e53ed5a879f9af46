"""Building and loading the library where something is in the way."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends.native import build, library, unavailable_reason
from paceline.backends.native.build import build as build_library
from paceline.backends.native.build import platform_tag

# writes the file that stands for the library, as slowly as a compiler
CMAKE = """#!/bin/sh
case "$1" in
-S) echo "$@" >> "{log}" ;;
--build) {compile} ;;
esac
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "CMakeLists.txt").touch()
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cmake whose library holds "whole". Returns where it writes down what it was told."""
    return _compiler(tmp_path, monkeypatch, 'echo whole > "$2/_lib.so"')


def _compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile: str) -> Path:
    tools, log = tmp_path / "bin", tmp_path / "log"
    tools.mkdir()
    (tools / "cmake").write_text(CMAKE.format(log=log, compile=compile))
    (tools / "cmake").chmod(0o755)
    for name in ("sh", "echo"):
        (tools / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tools))
    return log


def test_the_library_replaces_the_old_one(compiler: Path, sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "package"
    target.mkdir()
    (target / "_lib.so").write_text("old")
    with (target / "_lib.so").open() as loaded:
        assert build_library(sources, target) == target / "_lib.so"
        # who has the old one loaded keeps it
        assert loaded.read() == "old"
    assert (target / "_lib.so").read_text() == "whole\n"
    assert os.listdir(target) == ["_lib.so"]


def test_builds_at_the_same_time_do_not_share_a_file(
    compiler: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build puts its library in place after this one has written its own."""
    target = tmp_path / "package"
    target.mkdir()
    copy = functools.partial(shutil.copyfile)

    def interrupted(source: Path, destination: Path) -> None:
        copy(source, destination)
        monkeypatch.setattr(build.shutil, "copyfile", copy)
        # the other build is another process
        monkeypatch.setattr(build.os, "getpid", lambda: 0)
        build_library(sources, target)

    monkeypatch.setattr(build.shutil, "copyfile", interrupted)
    build_library(sources, target)
    assert (target / "_lib.so").read_text() == "whole\n"
    assert os.listdir(target) == ["_lib.so"]


def test_a_folder_that_cannot_be_written(
    compiler: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # root may write anywhere, but not where there is nothing
    missing = tmp_path / "nowhere"
    with pytest.raises(RuntimeError, match=f"{missing} cannot be written"):
        build_library(sources, missing)
    assert not compiler.exists(), "compiled for nothing"
    target = tmp_path / "package"
    (target / "_lib.so").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"cannot write .*_lib\.so: Is a directory"):
        build_library(sources, target)
    assert os.listdir(target) == ["_lib.so"]
    monkeypatch.setattr(build, "_HERE", missing)
    monkeypatch.setattr(build, "build", functools.partial(build_library, sources, missing))
    assert build.main() == 1


def test_what_a_compiler_says_is_told(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compiler(tmp_path, monkeypatch, 'echo "no member named wait" >&2; exit 2')
    with pytest.raises(RuntimeError, match="cmake --build failed:\nno member named wait"):
        build_library(sources, tmp_path)


def test_no_cmake_and_no_sources(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"cmake was not found.*C\+\+20"):
        build_library(sources, tmp_path)
    with pytest.raises(RuntimeError, match=f"no C\\+\\+ sources in {tmp_path}/none"):
        build_library(tmp_path / "none", tmp_path)


def test_an_installed_package_has_its_sources_among_its_data(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkout around it: what pip put under the environment's data is compiled."""
    here = tmp_path / "lib" / "paceline" / "backends" / "native"
    installed = tmp_path / "share" / "paceline" / "csrc"
    for folder in (here, installed):
        folder.mkdir(parents=True)
    (installed / "CMakeLists.txt").touch()
    monkeypatch.setattr(build, "_HERE", here)
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    build_library(target=here)
    assert f"-S {installed} " in compiler.read_text()


@pytest.mark.parametrize(
    ("machine", "symbols", "tag"),
    [
        (62, "GLIBC_2.2.5 GLIBC_2.29 GLIBC_PRIVATE GLIBCXX_3.4.22", "manylinux_2_29_x86_64"),
        # the runtime of GCC 11 came with a younger glibc than the symbols tell
        (62, "GLIBC_2.17 GLIBCXX_3.4 GLIBCXX_3.4.29", "manylinux_2_34_x86_64"),
        (62, "GLIBC_2.17 CXXABI_1.3 CXXABI_1.3.12 CXXABI_FLOAT128", "manylinux_2_31_x86_64"),
        (183, "GLIBC_2.17", "manylinux_2_17_aarch64"),
        # nobody knows where such a runtime is
        (62, "GLIBC_2.17 GLIBCXX_3.4.99", "linux_x86_64"),
        (62, "", "linux_x86_64"),
    ],
)
def test_the_tag_of_a_wheel(tmp_path: Path, machine: int, symbols: str, tag: str) -> None:
    header = b"\x7fELF".ljust(18, b"\0") + machine.to_bytes(2, "little")
    path = tmp_path / "_lib.so"
    path.write_bytes(header + b"".join(b"\0" + each.encode() for each in symbols.split()) + b"\0")
    assert platform_tag(path) == tag


def test_only_a_library_has_a_tag(tmp_path: Path) -> None:
    path = tmp_path / "_lib.so"
    for content in (b"", b"MZ".ljust(64), b"\x7fELF".ljust(64)):
        path.write_bytes(content)
        with pytest.raises(RuntimeError, match="is not a library for x86-64 or aarch64"):
            platform_tag(path)


class TestLoading:
    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        monkeypatch.setattr(library, "_PATH", tmp_path / "_lib.so")
        library._load.cache_clear()
        yield tmp_path / "_lib.so"
        library._load.cache_clear()

    def test_what_is_no_library(self, path: Path) -> None:
        path.write_text("truncated")
        assert "_lib.so cannot be loaded" in str(unavailable_reason())
        assert "python -m paceline.backends.native.build" in str(unavailable_reason())

    @pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
    @pytest.mark.parametrize(
        ("abi", "message"),
        [
            (library.ABI - 1, f"has interface {library.ABI - 1}, this version needs {library.ABI}"),
            # the right number, and functions missing all the same
            (library.ABI, "undefined symbol: paceline_error"),
        ],
    )
    def test_a_library_of_another_version(self, path: Path, abi: int, message: str) -> None:
        source = path.with_suffix(".c")
        source.write_text(f"int paceline_abi(void) {{ return {abi}; }}")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
        assert message in str(unavailable_reason())
        assert "build it again" in str(unavailable_reason())
