"""Print the Python lines of each room next to their limit; exit with 1 where one has more.

    python scripts/check_sizes.py

Lines are those of the files, empty ones, comments and docstrings too. A limit goes down when code
does; to raise one is a decision of its own, with the reason in the message of its commit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# lines of one file of the package: a longer one has something that belongs elsewhere
MOST_OF_A_FILE: Final = 550
# room: limit, then patterns below paceline/, where "-" takes files away, and the number aimed at
ROOMS: Final[dict[str, tuple[int, tuple[str, ...], int]]] = {
    "core": (8_502, ("core/**/*",), 7_800),
    # what is read to follow a step without targets
    "core: plain step": (
        3_103,
        ("core/scheduler", "core/request", "core/step/*", "core/queues/*", "core/memory/block_pool",
         "core/memory/interface", "core/memory/kv_cache", "core/policies/fcfs",
         "-core/step/amend", "-core/step/speculation", "-core/queues/fair_queue"),
        2_900,
    ),
    "speculation": (1_144, ("speculation/**/*",), 1_000),
    "checkpoints": (8_223, ("checkpoints/**/*",), 6_900),
    "backends": (10_724, ("backends/**/*",), 9_600),
    "timeline": (1_851, ("timeline/**/*",), 1_700),
    "engine": (12_667, ("engine/**/*",), 7_000),
    "http": (3_643, ("http/**/*",), 3_000),
    "routing": (2_526, ("routing/**/*",), 1_200),
    "server, web": (22_638, ("server/**/*", "web/**/*"), 18_900),
    "gateway": (15_180, ("gateway/**/*",), 8_300),
    "vllm": (2_254, ("vllm/**/*",), 1_700),
    "quantize": (2_430, ("quantize/**/*",), 1_100),
    "fleet": (1_896, ("fleet/**/*",), 2_000),
    "client": (1_825, ("client/**/*",), 1_800),
    "bench": (2_182, ("bench/**/*",), 1_200),
    "sim": (7_723, ("sim/**/*",), 6_700),
    "cli": (11_431, ("cli/**/*",), 7_400),
    "benchmarks": (23_507, ("../benchmarks/**/*",), 13_500),
    "tests": (111_649, ("../tests/**/*",), 83_000),
}  # fmt: skip


def lines_of(patterns: tuple[str, ...]) -> int:
    """Count the lines of the Python files that match."""
    found: set[Path] = set()
    for pattern in patterns:
        paths = set((ROOT / "paceline").glob(f"{pattern.removeprefix('-')}.py"))
        assert paths, f"no file matches {pattern}"
        found = found - paths if pattern.startswith("-") else found | paths
    return sum(path.read_bytes().count(b"\n") for path in found)


def main() -> int:
    """Print the table; return 1 where a room or a file is above its limit."""
    wrong = []
    print(f"{'lines':16}{'now':>8}{'limit':>8}{'aim':>8}")
    for room, (limit, patterns, aim) in ROOMS.items():
        lines = lines_of(patterns)
        print(f"{room:16}{lines:8,}{limit:8,}{aim:8,}{'  <- too many' if lines > limit else ''}")
        wrong += [room] if lines > limit else []
    for path in (ROOT / "paceline").rglob("*.py"):
        lines = path.read_bytes().count(b"\n")
        if lines > MOST_OF_A_FILE:
            wrong.append(f"{path.relative_to(ROOT)} ({lines} lines, at most {MOST_OF_A_FILE})")
    if wrong:
        print("above the limits of scripts/check_sizes.py:", ", ".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
