"""Run a benchmark by its name, or list them: ``make bench NAME=...``.

    python -m benchmarks [NAME] [ARGUMENTS]

A name is that of a folder, of a file here, or of one of INSIDE. ``bench-NAME``, an earlier target
of make, is answered with what to type now.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import Final

# files of a folder that are benchmarks of their own
INSIDE: Final = ("kernels/accuracy", "kernels/levels", "peers/sizes")
PARTS_OF: Final = dict.fromkeys(("gaps", "background", "neighbours"), "promises")


def benchmarks() -> dict[str, Path]:
    """Return the files of the benchmarks by name."""
    here = Path(__file__).parent
    paths = list(here.glob("[a-z]*.py"))
    paths += [here / f"{name}.py" for name in INSIDE]
    found = {path.stem: path for path in paths}
    found |= {path.parent.name: path for path in here.glob("*/__main__.py")}
    return dict(sorted(found.items()))


def main() -> int:
    """Run one, in place of this process; without a name, list them and return 2."""
    name, *arguments = sys.argv[1:] or [""]
    found = benchmarks()
    if name in found:
        inside = found[name].relative_to(Path(__file__).parents[1]).with_suffix("")
        module = ".".join(inside.parts).removesuffix(".__main__")
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    bare = name.removeprefix("bench-")
    if bare in found:
        print(f"make {name} is now make bench NAME={bare}", file=sys.stderr)
        return 2
    if whole := PARTS_OF.get(bare):
        print(
            f"{bare} is part of NAME={whole}: PARTS={bare} make bench NAME={whole}", file=sys.stderr
        )
        return 2
    if name:
        print(f"there is no benchmark {bare!r}", file=sys.stderr)
    print("make bench NAME=...; the head of each one's file says what it measures and reads:\n")
    for known, path in found.items():
        title = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        print(f"{known:16} {title}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
