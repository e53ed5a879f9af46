"""Lines and statements of the core, by part and by folder, beside the lines that it may have.

    python scripts/core_size.py [--by-feature] [CHECKOUT]

Lines are those of the files, empty ones, comments and docstrings too; docstrings are no statements.
The room of speculation is told beside core, as part of which it was counted before it had one.
``--by-feature`` takes what came after the core's rooms were drawn apart from the rest.
CHECKOUT is another working tree. tests/core/test_core_size.py holds the limits.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

CORE: Final = Path("paceline") / "core"
# as it is found from there
SPECULATION: Final = "../speculation"


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
        2946,
        (
            "scheduler.py",
            "request.py",
            "step",
            "queues",
            "memory/block_pool.py",
            "memory/kv_cache.py",
            "policies/fcfs.py",
        ),
        ("step/speculation.py", "queues/fair_queue.py"),
    ),
    # what the scheduler is given and gives
    "contracts": Part(
        782,
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
    "scheduler.py": Part(288, ("scheduler.py",)),
    "core": Part(8370, ("",)),
    # a room above core, which works without it
    "speculation": Part(1130, (SPECULATION,)),
}

# What came after the core's rooms were drawn: files and folders, and classes and functions of other
# files as ``FILE:NAME``. What a feature added to functions of others stays with these.
FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "speculation": (
        "step/speculation.py",
        "outputs.py:Draft",
        "step/state.py:Totals.note_draft",
        "grammar.py:TokenMatcher.look_ahead",
        "grammar.py:TokenMatcher.forced",
    ),
    "forecasts": (
        "pacing/first_token.py",
        "predict/output_length.py:WorkEstimator.spread",
        "queues/request_queue.py:WaitingQueue.num_ahead",
        "queues/request_queue.py:RequestQueue.num_ahead",
        "queues/fair_queue.py:FairQueue.num_ahead",
        "queues/waiting.py:WaitingRoom.ahead_of",
    ),
    "window blocks": ("memory/windows.py", "outputs.py:WindowBlock"),
    "late yield": (
        "pacing/feasibility.py:Others",
        "pacing/feasibility.py:Feasibility.endangers",
        "pacing/feasibility.py:Feasibility.others",
        "pacing/limits.py:PacedStep._let_rejoin",
    ),
    "pooling": ("pooling.py",),
    "resume": ("request.py:ResumedOutput", "pacing/door.py:_check_resumed"),
    "tenant weights": ("tenant_weights.py",),
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


def size_of_definition(path: Path, name: str) -> Size:
    """Of a class or function of a file, ``Class.method`` for one inside of a class."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and child.name == part
        )
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return Size((node.end_lineno or first) - first + 1, num_statements(node))


def size_of_feature(names: tuple[str, ...], core: Path) -> Size:
    """Of files, folders, and definitions of other files."""
    whole = size_of(files_of(Part(0, tuple(name for name in names if ":" not in name)), core))
    parts = [name.split(":") for name in names if ":" in name]
    sizes = [whole, *(size_of_definition(core / path, name) for path, name in parts)]
    return Size(*map(sum, zip(*sizes, strict=True)))


def features(core: Path) -> dict[str, Size]:
    """By feature, the largest first; what is left; all of core; and the room of speculation."""
    sizes = {name: size_of_feature(names, core) for name, names in FEATURES.items()}
    sizes = dict(sorted(sizes.items(), key=lambda item: -item[1].lines))
    total = size_of(files_of(PARTS["core"], core))
    taken = [sum(column) for column in zip(*sizes.values(), strict=True)]
    left = Size(total.lines - taken[0], total.statements - taken[1])
    beside = size_of(files_of(PARTS["speculation"], core))
    return sizes | {"all else": left, "core": total, "beside core": beside}


def feature_table(core: Path) -> str:
    """Every feature in a line."""
    rows = [("feature", "lines", "statements")]
    rows += [(name, f"{s.lines:,}", f"{s.statements:,}") for name, s in features(core).items()]
    return "\n".join(f"{row[0]:16}{row[1]:>8}{row[2]:>12}" for row in rows)


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--by-feature", action="store_true")
    parser.add_argument("checkout", nargs="?", type=Path, default=Path())
    asked = parser.parse_args()
    print((feature_table if asked.by_feature else table)(asked.checkout / CORE))
