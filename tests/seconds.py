"""Where a run of the tests took how long: ``python -m tests.seconds build/tests.xml [MOST]``.

``make test`` writes that file. A test's seconds are those of it and its fixtures, one after
another, whatever ran next to it.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter


def main() -> None:
    """Print the seconds by folder, file and test, the MOST (20) of each."""
    folders, files, tests = Counter[str](), Counter[str](), Counter[str]()
    for case in ElementTree.parse(sys.argv[1]).getroot().iter("testcase"):
        # tests.core.test_tier.TestMoves is in tests/core/test_tier.py
        parts = [part for part in case.attrib["classname"].split(".") if not part[:1].isupper()]
        seconds, file = float(case.attrib["time"]), "/".join(parts)
        folders["/".join(parts[:-1][:3])] += seconds
        files[file] += seconds
        tests[f"{file}::{case.attrib['name']}"] += seconds
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    for title, found in (("folder", folders), ("file", files), ("test", tests)):
        print(f"\nseconds by {title}, {sum(found.values()):.0f} in all of {len(found)}")
        print("\n".join(f"{s:9.1f}  {name}" for name, s in found.most_common(most)))


if __name__ == "__main__":
    main()
