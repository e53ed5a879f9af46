"""List the benchmarks, for ``make bench NAME=...``."""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def main() -> int:
    """Print each benchmark with the first line of its docstring; return 2, as no name was given."""
    print("make bench NAME=...; the head of benchmarks/NAME says what it measures and reads:\n")
    folder = Path(__file__).parent
    paths = {path.stem: path for path in folder.glob("[a-z]*.py")}
    paths |= {path.parent.name: path for path in folder.glob("*/__main__.py")}
    for name, path in sorted(paths.items()):
        source = path.read_text()
        if 'if __name__ == "__main__":' in source:
            title = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
            print(f"{name:16} {title}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
