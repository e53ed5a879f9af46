"""Where a run of the tests took how long: ``python -m tests.seconds FILE [BEFORE]``.

FILE is what ``pytest --junitxml=FILE`` wrote, as ``make test`` does: build/tests.xml. With the file
of an earlier run as BEFORE, what each folder takes more than then: the share of a change.

The seconds are those of every test with its fixtures, one after another, whatever ran beside it.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Timed", "main", "read_tests", "table"]


class Timed(NamedTuple):
    """One test with its fixtures."""

    # tests/core/test_tier.py, if nothing but functions and classes is tested there
    file: str
    name: str
    seconds: float

    @property
    def folder(self) -> str:
        """With the folders above, down to the second below tests/."""
        return "/".join(self.file.split("/")[:-1][:3])


def read_tests(path: Path) -> list[Timed]:
    """Raises ValueError where there is no such file, or it is none of pytest's."""
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
        return [
            Timed(_file(c.attrib["classname"]), c.attrib["name"], float(c.attrib["time"]))
            for c in cases
        ]
    except (OSError, ElementTree.ParseError, KeyError) as error:
        raise ValueError(
            f"{path} holds no durations of tests: {error}; `make test` writes it"
        ) from None


def _file(class_name: str) -> str:
    """tests.core.test_tier.TestMoves is in tests/core/test_tier.py."""
    parts = class_name.split(".")
    while len(parts) > 1 and parts[-1][:1].isupper():
        parts.pop()
    return "/".join(parts) + ".py"


def table(tests: Iterable[Timed], before: Iterable[Timed] = (), *, most: int = 20) -> str:
    """By folder, those that take longest first; then the slowest files and tests."""
    tests, before = list(tests), list(before)
    folders, counts = Counter[str](), Counter[str]()
    files, names = Counter[str](), Counter[str]()
    for run, sign in ((tests, 1), (before, -1)):
        for test in run:
            folders[test.folder] += sign * test.seconds
            counts[test.folder] += sign
            files[test.file] += sign * test.seconds
            names[f"{test.file}::{test.name}"] += sign * test.seconds
    more = "more " if before else ""
    lines = [f"{'seconds':>9} {more + 'tests':>11}  folder"]
    lines += [f"{s:9.1f} {counts[name]:11d}  {name}" for name, s in folders.most_common()]
    lines.append(f"{sum(folders.values()):9.1f} {sum(counts.values()):11d}  in all")
    for title, seconds in (("file", files), ("test", names)):
        lines += ["", f"{more}seconds by {title}, the first {most} of {len(seconds)}"]
        lines += [f"{s:9.1f}  {name}" for name, s in seconds.most_common(most)]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="seconds of a run of the tests, by folder")
    parser.add_argument("file", type=Path)
    parser.add_argument("before", type=Path, nargs="?", help="an earlier run, to compare with")
    parser.add_argument("--most", type=int, default=20, help="files and tests shown (20)")
    asked = parser.parse_args(arguments)
    try:
        before = [] if asked.before is None else read_tests(asked.before)
        print(table(read_tests(asked.file), before, most=asked.most))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
