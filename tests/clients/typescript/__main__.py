"""See the package."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.common.processes import Unavailable
from tests.clients.typescript.compiler import CLIENT, Wrong, check, install


def main() -> int:
    parser = argparse.ArgumentParser(description="check the types of clients/typescript")
    parser.add_argument("--write", action="store_true", help="renew the declarations")
    args = parser.parse_args()
    try:
        tsc = install()
    except Unavailable as error:
        print(f"typescript: absent: {error}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            made = check(tsc, Path(scratch))
        except Wrong as error:
            print(error)
            return 1
    there = {path.name: path.read_text() for path in (CLIENT / "types").iterdir()}
    if args.write:
        for name, text in made.items():
            (CLIENT / "types" / name).write_text(text)
        for name in set(there) - set(made):
            (CLIENT / "types" / name).unlink()
    old = (
        []
        if args.write
        else sorted(name for name in {*made, *there} if made.get(name) != there.get(name))
    )
    for name in old:
        print(f"types/{name} is not of the sources: python -m tests.clients.typescript --write")
    print(json.dumps({"test": "typescript", "failures": len(old), "files": sorted(made)}))
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
