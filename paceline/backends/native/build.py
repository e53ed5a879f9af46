"""Compile the native library next to this file: ``python -m paceline.backends.native.build``.

``make`` runs it after installing; it needs CMake and a C++20 compiler, and a checkout. Without it
everything works but ``--compute native``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["build", "main"]

_HERE = Path(__file__).resolve().parent
_SOURCES = _HERE.parents[2] / "csrc"


def build(sources: Path = _SOURCES, target: Path = _HERE) -> Path:
    """Compile ``sources`` and move the library into ``target``, whole or not at all.

    Raises:
        RuntimeError: CMake or a C++20 compiler is missing, or the compilation failed.
    """
    if not (sources / "CMakeLists.txt").is_file():
        raise RuntimeError(f"no C++ sources in {sources}; build from a checkout of the project")
    if shutil.which("cmake") is None:
        raise RuntimeError("cmake was not found; install CMake 3.20 or later and a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        configure = ["cmake", "-S", str(sources), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"]
        if shutil.which("ninja") is not None:
            configure += ["-G", "Ninja"]
        for command in (configure, ["cmake", "--build", folder, "--parallel"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                output = (done.stdout + done.stderr)[-4000:]
                raise RuntimeError(f"{' '.join(command[:2])} failed:\n{output}")
        made = next(Path(folder).glob("_lib*.so"))
        fresh = target / f".{made.name}.new"
        shutil.copyfile(made, fresh)
        return fresh.replace(target / made.name)


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
