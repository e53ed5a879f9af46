"""The compiled part of the wheel; everything else is in pyproject.toml.

setuptools calls ``paceline/backends/native/build.py``, the one way to compile the kernels
(docs/adr/0004-native-kernels.md says why not scikit-build-core). PACELINE_KERNELS says what becomes
of an installation where they cannot be compiled: "auto" (the default) goes on without them and says
so, "required" fails, "off" does not try.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE = Path("paceline", "backends", "native")
# by path: importing the package would need what it depends on
sys.path.insert(0, str(ROOT / NATIVE))
import build as kernels  # noqa: E402


class BuildPy(build_py):
    """Copies the package and compiles the kernels into the copy. An editable installation takes
    what lies in the checkout, which `make` keeps up to date."""

    def run(self) -> None:
        super().run()
        wanted = os.environ.get("PACELINE_KERNELS", "auto")
        if wanted not in ("auto", "required", "off"):
            raise SystemExit(f"PACELINE_KERNELS is auto, required or off, got {wanted!r}")
        if self.editable_mode or wanted == "off":
            return
        target = Path(self.build_lib) / NATIVE
        try:
            made = kernels.build(ROOT / "csrc", target)
        except RuntimeError as error:
            if wanted == "required":
                raise SystemExit(f"paceline: {error}") from None
            print(
                f"paceline: installed without native kernels: {error}\n"
                "paceline: compile them later with `python -m paceline.backends.native.build`, or "
                "compute with PyTorch: pip install 'paceline[torch]'",
                file=sys.stderr,
            )
        else:
            print(f"paceline: compiled {made.stat().st_size / 1e6:.1f} MB of native kernels")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        library = Path(self.build_lib) / NATIVE / kernels.LIBRARY
        return [
            *super().get_outputs(include_bytecode),
            *([str(library)] if library.is_file() else []),
        ]


class BdistWheel(bdist_wheel):
    """For any Python 3, since ctypes calls the kernels, on the systems that these run on."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.get_finalized_command("build_py").build_lib) / NATIVE / kernels.LIBRARY
        return "py3", "none", kernels.platform_tag(library) if library.is_file() else "any"


class WithKernels(Distribution):
    """Files go where those of a platform go, since the kernels lie among them."""

    def has_ext_modules(self) -> bool:
        return True


setup(distclass=WithKernels, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
