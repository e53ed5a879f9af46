"""Compile the native library next to this file: ``python -m paceline.backends.native.build``.

``make`` runs it after installing and whenever the sources change, ``setup.py`` while it makes a
wheel; it needs CMake and a C++20 compiler. Without it everything works but ``--compute native``.
Imports nothing of the package, since both callers run before the package is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["LIBRARY", "build", "main", "platform_tag"]

LIBRARY: Final = "_lib.so"
_HERE = Path(__file__).resolve().parent
# versions of the C++ runtime's symbols, and the oldest glibc that distributions ship them with, as
# the manylinux policies of auditwheel 6.8 pair them
_RUNTIMES: Final = {
    b"GLIBCXX": {(3, 4, 19): 17, (3, 4, 22): 24, (3, 4, 24): 27, (3, 4, 28): 31, (3, 4, 29): 34,
                 (3, 4, 30): 35},
    b"CXXABI": {(1, 3, 7): 17, (1, 3, 10): 24, (1, 3, 11): 27, (1, 3, 12): 31, (1, 3, 13): 34},
}  # fmt: skip


def _find_sources() -> Path:
    """Return the sources of a checkout, else those among an installed package's data."""
    checkout = _HERE.parents[2] / "csrc"
    installed = Path(sysconfig.get_path("data"), "share", "paceline", "csrc")
    return checkout if (checkout / "CMakeLists.txt").is_file() else installed


def build(sources: Path | None = None, target: Path = _HERE, options: Sequence[str] = ()) -> Path:
    """Compile ``sources`` and move the library into ``target``, whole or not at all. Concurrent
    builds do not disturb each other: the last one's library stays.

    Args:
        sources: None: the sources that came with this package.
        options: for CMake's configuration, such as "-DPACELINE_STAND_INS=ON".

    Raises:
        RuntimeError: CMake or a C++20 compiler is missing, the compilation failed, or the library
            cannot be written.
    """
    sources = sources or _find_sources()
    if not (sources / "CMakeLists.txt").is_file():
        raise RuntimeError(f"no C++ sources in {sources}; build from a checkout of the project")
    if shutil.which("cmake") is None:
        raise RuntimeError(
            "cmake was not found; install CMake 3.20 or later and a C++20 compiler (g++ 11 or "
            "later, clang 14 or later)"
        )
    # checked before minutes of compiling
    if not os.access(target, os.W_OK):
        raise RuntimeError(
            f"{target} cannot be written by this user; install as a user who may write it"
        )
    with tempfile.TemporaryDirectory() as folder:
        configure = ["cmake", "-S", str(sources), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"]
        configure += options
        if shutil.which("ninja") is not None:
            configure += ["-G", "Ninja"]
        for command in (configure, ["cmake", "--build", folder, "--parallel"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                output = (done.stdout + done.stderr)[-4000:]
                raise RuntimeError(f"{' '.join(command[:2])} failed:\n{output}")
        return _put(Path(folder, LIBRARY), target)


def platform_tag(library: Path) -> str:
    """Return the platform of a wheel with ``library``: "manylinux_2_29_x86_64" runs where glibc is
    2.29 or later (PEP 600). "linux_x86_64", which package indexes refuse, means that its C++
    runtime is younger than any in ``_RUNTIMES``.

    Read from the versions of symbols that the file names, so that anything newer that a compiler or
    a source uses raises the minimum. Raises RuntimeError for a file that is no such library.
    """
    data = library.read_bytes()
    # e_machine of the ELF header
    machine = {62: "x86_64", 183: "aarch64"}.get(int.from_bytes(data[18:20], "little"))
    if data[:4] != b"\x7fELF" or machine is None:
        raise RuntimeError(f"{library} is not a library for x86-64 or aarch64")
    floors = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.([0-9]+)", data)]
    for runtime, known in _RUNTIMES.items():
        found = [tuple(map(int, text.split(b"."))) for text in
                 re.findall(rb"\0%s_([0-9]+(?:\.[0-9]+)*)" % runtime, data)]  # fmt: skip
        if not found:
            continue
        enough = [glibc for version, glibc in known.items() if max(found) <= version]
        if not enough:
            return f"linux_{machine}"
        floors.append(enough[0])
    return f"manylinux_2_{max(floors)}_{machine}" if floors else f"linux_{machine}"


def _put(made: Path, target: Path) -> Path:
    """Copy a file into a folder, where it appears complete or not at all."""
    # the name has this process's id, since another build's copy must not be overwritten
    fresh = target / f".{made.name}.{os.getpid()}"
    try:
        shutil.copyfile(made, fresh)
        return fresh.replace(target / made.name)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise RuntimeError(f"cannot write {target / made.name}: {error.strerror}") from error


def main() -> int:
    """Build the library and print the result."""
    began = time.monotonic()
    try:
        path = build()
    except RuntimeError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    print(f"{path} built in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
