"""Draws the rooms of the package from its imports, and counts the arrows between them.

    python scripts/rooms.py [--write] [CHECKOUT]

A room is a folder or module directly inside of the package, or of one of the folders in ``INSIDE``.
Its floor is one above the highest room that it imports, so an arrow points down unless it is part
of a circle. ``--write`` puts the drawing into build/rooms.md, without numbers of lines. CHECKOUT is
another working tree, for a drawing of how things were.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import grimp

PACKAGE: Final = "paceline"
# folders whose rooms are drawn too
INSIDE: Final = ("core", "engine", "server", "gateway", "checkpoints", "backends", "cli")
PAGE: Final = Path("build") / "rooms.md"

# of a room, the rooms that it imports, with how many imports of modules
Arrows = Mapping[str, Mapping[str, int]]


def arrows_of(graph: grimp.ImportGraph, container: str) -> Arrows:
    """The arrows between the rooms of ``container``, a dotted name."""
    depth = container.count(".") + 1
    found: dict[str, dict[str, int]] = {}
    for module in graph.modules:
        if not module.startswith(f"{container}."):
            continue
        room = module.split(".")[depth]
        arrows = found.setdefault(room, defaultdict(int))
        for imported in graph.find_modules_directly_imported_by(module):
            if imported.startswith(f"{container}.") and imported.split(".")[depth] != room:
                arrows[imported.split(".")[depth]] += 1
    return found


def floors_of(arrows: Arrows) -> tuple[list[list[str]], list[str]]:
    """Rooms by floor, the lowest first, and those that have none: they are in or above a circle."""
    floors: list[list[str]] = []
    placed: set[str] = set()
    while True:
        floor = [r for r in arrows if r not in placed and placed.issuperset(arrows[r])]
        if not floor:
            return floors, sorted(set(arrows) - placed)
        floors.append(sorted(floor))
        placed.update(floor)


def drawing(arrows: Arrows, notes: Mapping[str, str]) -> list[str]:
    """Lines from the highest floor down: floor, room, ``notes`` of it, what it imports."""
    floors, circle = floors_of(arrows)
    width = max(map(len, arrows))
    rows = [("?", room) for room in circle]
    rows += [(str(n), room) for n in reversed(range(len(floors))) for room in floors[n]]
    last = None
    lines = []
    for number, room in rows:
        label = number if number != last else ""
        last = number
        below = " ".join(sorted(arrows[room])) or "-"
        lines.append(f"    {label:>2}  {room:{width}}  {notes.get(room, '')}{below}".rstrip())
    return lines


def size_of(path: Path) -> tuple[int, int]:
    """Python files and their lines."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return len(files), sum(len(file.read_text().splitlines()) for file in files)


def page_of(graph: grimp.ImportGraph) -> str:
    """The drawing for build/rooms.md."""
    parts = ["# Rooms, by their imports\n\n"]
    for container in (PACKAGE, *(f"{PACKAGE}.{name}" for name in INSIDE)):
        arrows = arrows_of(graph, container)
        count = sum(map(len, arrows.values()))
        parts.append(f"`{container.replace('.', '/')}/`: {len(arrows)} rooms, {count} arrows\n\n")
        parts.append("\n".join(drawing(arrows, {})) + "\n\n")
    return "".join(parts).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path())
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    root: Path = args.checkout.resolve()
    sys.path.insert(0, str(root))
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    for container in (PACKAGE, *(f"{PACKAGE}.{name}" for name in INSIDE)):
        arrows = arrows_of(graph, container)
        folder = root / container.replace(".", "/")
        sizes = {
            room: size_of(folder / room if (folder / room).is_dir() else folder / f"{room}.py")
            for room in arrows
        }
        notes = {
            room: f"{files:4} files {lines:6} lines  " for room, (files, lines) in sizes.items()
        }
        print(f"{container.replace('.', '/')}/\n" + "\n".join(drawing(arrows, notes)))
        _, circle = floors_of(arrows)
        print(
            f"    {len(arrows)} rooms, {sum(map(len, arrows.values()))} arrows "
            f"({sum(sum(a.values()) for a in arrows.values())} imports), "
            f"{len(circle)} rooms in or above a circle, "
            f"{sum(lines for _, lines in sizes.values())} lines\n"
        )
    if args.write:
        page = root / PAGE
        page.parent.mkdir(exist_ok=True)
        page.write_text(page_of(graph))


if __name__ == "__main__":
    main()
