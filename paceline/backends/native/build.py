"""Compile the native library next to this file: ``python -m paceline.backends.native.build``.

``make`` runs it after installing and whenever the sources change; it needs CMake and a C++20
compiler. Without it everything works but ``--compute native``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["build", "main"]

_HERE = Path(__file__).resolve().parent


def _find_sources() -> Path:
    """Those of a checkout, else those that an installed package has among its data."""
    checkout = _HERE.parents[2] / "csrc"
    installed = Path(sysconfig.get_path("data"), "share", "paceline", "csrc")
    return checkout if (checkout / "CMakeLists.txt").is_file() else installed


def build(sources: Path | None = None, target: Path = _HERE, options: Sequence[str] = ()) -> Path:
    """Compile ``sources`` and move the library into ``target``, whole or not at all. Builds do not
    get in each other's way: the last one's library stays.

    Args:
        sources: None: those that came with this package.
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
    # asked before minutes of compiling
    if not os.access(target, os.W_OK):
        raise RuntimeError(f"{target} cannot be written by this user; install as one who may")
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
        return _put(next(Path(folder).glob("_lib*.so")), target)


def _put(made: Path, target: Path) -> Path:
    """Copy a file into a folder, where it appears complete or not at all."""
    # a name of this process's own: another build's copy must not be written into
    fresh = target / f".{made.name}.{os.getpid()}"
    try:
        shutil.copyfile(made, fresh)
        return fresh.replace(target / made.name)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise RuntimeError(f"cannot write {target / made.name}: {error.strerror}") from error


def main() -> int:
    """Build and say what became of it."""
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
