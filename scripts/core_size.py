"""Lines and statements of the core, by part and by folder, beside the lines that it may have.

    python scripts/core_size.py [CHECKOUT]

Lines are those of the files, empty ones, comments and docstrings too; docstrings are no statements.
CHECKOUT is another working tree. tests/core/test_core_size.py holds the limits.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

CORE: Final = Path("paceline") / "core"


class Size(NamedTuple):
    """Of some files."""

    lines: int
    statements: int


class Part(NamedTuple):
    """Files and folders below core, and what they may have together."""

    lines: int
    paths: tuple[str, ...]
    # of these, files that belong to another part
    without: tuple[str, ...] = ()


# Limits go down when code does. What raises one is a decision of its own, with the reason in the
# message of its commit.
PARTS: Final[Mapping[str, Part]] = {
    # what somebody reads to follow a step without targets
    "plain step": Part(
        3280,
        (
            "scheduler.py",
            "request.py",
            "step",
            "queues",
            "memory/block_pool.py",
            "memory/kv_cache.py",
            "memory/preemption.py",
            "policies/fcfs.py",
        ),
        ("step/drafts.py", "step/draft_choice.py", "queues/fair_queue.py"),
    ),
    # what the scheduler is given and gives
    "contracts": Part(
        820,
        (
            "backend.py",
            "config.py",
            "outputs.py",
            "ranges.py",
            "slo.py",
            "stats.py",
            "tenant_weights.py",
            "tier.py",
        ),
    ),
    "scheduler.py": Part(299, ("scheduler.py",)),
    "core": Part(9310, ("",)),
}


def files_of(part: Part, core: Path) -> list[Path]:
    """The files of a part, in order."""
    found: list[Path] = []
    for name in part.paths:
        path = core / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [path for path in found if path.relative_to(core).as_posix() not in part.without]


def num_statements(tree: ast.AST) -> int:
    """Statements at any depth, without docstrings."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(tree)
    )


def size_of(files: list[Path]) -> Size:
    """Of these files together."""
    sources = [path.read_text(encoding="utf-8") for path in files]
    lines = sum(source.count("\n") for source in sources)
    return Size(lines, sum(num_statements(ast.parse(source)) for source in sources))


def table(core: Path) -> str:
    """Every part and folder of core in a line."""
    rows = [("part", "lines", "limit", "statements")]
    for name, part in PARTS.items():
        size = size_of(files_of(part, core))
        rows.append((name, f"{size.lines:,}", f"{part.lines:,}", f"{size.statements:,}"))
    folders = {path.parent for path in core.rglob("*.py")}
    for folder in sorted(folders):
        size = size_of(sorted(folder.glob("*.py")))
        name = f"{folder.relative_to(core).as_posix()}/".replace("./", "core/ itself")
        rows.append((name, f"{size.lines:,}", "", f"{size.statements:,}"))
    return "\n".join(f"{row[0]:14}{row[1]:>8}{row[2]:>8}{row[3]:>12}" for row in rows)


if __name__ == "__main__":
    print(table(Path(*sys.argv[1:2]) / CORE))
