"""core and speculation import the standard library only, and of that nothing that knows time,
chance, the machine or other threads. import-linter sees packages but not the standard library, so
this walks the source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import paceline.core

CORE = Path(paceline.core.__file__).parent
# folders, and the packages of ours that their modules may import
PURE = {
    CORE: ("paceline.core", "paceline.errors", "paceline.ranges"),
    CORE.parent / "speculation": (
        "paceline.core",
        "paceline.errors",
        "paceline.ranges",
        "paceline.speculation",
    ),
}

BANNED = {
    "asyncio",
    "concurrent",
    "ctypes",
    "datetime",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "pickle",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
}
# the type of a step's result; core never makes or waits for one
ALLOWED = {
    ("backend.py", "concurrent.futures", "Future"),
    ("grammar.py", "concurrent.futures", "Future"),
}
BANNED_CALLS = {"open", "input", "print", "exec", "eval", "__import__"}


def violations(name: str, source: str, own: tuple[str, ...] = PURE[CORE]) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        imported: list[tuple[str, str | None]] = []
        if isinstance(node, ast.Import):
            imported = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imported = [(module, alias.name) for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in BANNED_CALLS
        ):
            found.append(f"{name}:{line} calls {node.func.id}()")
        for module, member in imported:
            top = module.split(".")[0]
            if (name, module, member) in ALLOWED or ".".join(module.split(".")[:2]) in own:
                continue
            if top not in sys.stdlib_module_names or top in BANNED:
                found.append(f"{name}:{line} imports {module}")
    return found


@pytest.mark.parametrize(
    "path", sorted(path for folder in PURE for path in folder.rglob("*.py")), ids=lambda p: p.name
)
def test_module_is_pure(path: Path) -> None:
    own = next(own for folder, own in PURE.items() if folder in path.parents)
    assert violations(path.name, path.read_text(), own) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import numpy as np",
        "from paceline.engine import core",
        "from ..engine import core",
        "from paceline.speculation.drafts import Drafts",
        "import concurrent.futures",
        "from concurrent.futures import ThreadPoolExecutor",
        "def f():\n    import random",
        "print(1)",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert violations("backend.py", source)
