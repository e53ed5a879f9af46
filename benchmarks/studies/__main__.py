"""``python -m benchmarks.studies [NAME ...] [--write]``: print a study's tables, or write its page.

Without names: all of them. The last line is JSON: the seconds of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module

from benchmarks.studies.common import Study
from benchmarks.studies.page import DOCS, write_page
from paceline.bench.machine import machine

NAMES = (
    "ablation",
    "forecasts",
    "capacity",
    "budget",
    "batching",
    "paging",
    "policies",
    "preemption",
    "coalescing",
    "disaggregation",
    "speculation",
    "adapters",
    "models",
)


def load(name: str) -> Study:
    """Return the study of that name."""
    study = import_module(f"benchmarks.studies.{name}").STUDY
    assert isinstance(study, Study)
    return study


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.studies", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--write", action="store_true", help="put tables and plots into docs/studies"
    )
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown:
        sys.exit(f"no study {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    seconds: dict[str, float] = {}
    for name in args.names or NAMES:
        started = time.perf_counter()
        study = load(name)
        tables = study.tables()
        for title, table in tables.items():
            print(f"{name}: {title}\n\n{table}\n")
        if args.write:
            write_page(name, tables)
            if study.plots is not None:
                study.plots(DOCS)
        seconds[name] = round(time.perf_counter() - started, 1)
    line = {"bench": "studies", "machine": machine(), "results": {"seconds": seconds}}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
