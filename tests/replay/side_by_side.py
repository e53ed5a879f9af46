"""The core of a commit and the working tree's, through the same scenarios: the same decisions?

    python -m tests.replay.side_by_side [--base COMMIT] [--seeds N] [--first SEED]
        [--policy NAME ...] [--processes N]

Each seed is played with each policy; the base is the commit that the file BASE names if none is
given. The first difference is printed whole, others by seed and policy. Ends with 1 if there were
any, with 2 if the base is not to be had.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tests.replay.base import NoBaseError, named_base, unpack_core
from tests.replay.difference import first_difference
from tests.replay.observe import Core, policies
from tests.replay.scenarios import play


class Played(NamedTuple):
    """One scenario, played by both."""

    policy: str
    seed: int
    # of the working tree's core
    num_lines: int
    # None: the same
    difference: str | None


def compare(base: Core, scenario: tuple[str, int]) -> Played:
    """Play one scenario, a policy and a seed, with both cores."""
    before, after = _log(base, *scenario), _log(Core(), *scenario)
    found = first_difference(before, after, ("base", "working tree"))
    if found is None and after[-1].startswith("raised"):
        # a mistake that both make is no difference, but no decision either
        found = "\n".join(after[-12:])
    return Played(*scenario, len(after), found)


def compare_all(base: Core, seeds: Sequence[int], names: Sequence[str] = ()) -> Iterator[Played]:
    """All policies of the base, or those named, with all seeds."""
    for seed, policy in product(seeds, names or policies(base)):
        yield compare(base, (policy, seed))


def _log(core: Core, policy: str, seed: int) -> list[str]:
    try:
        return play(core, policy, seed)
    except Exception as error:
        where = traceback.format_exception(error)
        return ["".join(where), f"raised {type(error).__name__}: {error}"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", default=named_base())
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--policy", action="append", default=[])
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.seeds)
    started = time.monotonic()
    num_lines = 0
    differ: list[Played] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            base = unpack_core(asked.base, Path(folder))
        except NoBaseError as error:
            print(error, file=sys.stderr)
            return 2
        scenarios = [(p, s) for s in seeds for p in asked.policy or policies(base)]
        # a forked process finds the base where this one does
        with multiprocessing.get_context("fork").Pool(asked.processes) as pool:
            for played in pool.imap(partial(compare, base), scenarios, chunksize=7):
                num_lines += played.num_lines
                if played.difference is None:
                    continue
                if not differ:
                    print(f"{played.policy}, seed {played.seed}: {played.difference}", flush=True)
                differ.append(played)
    if differ:
        others = ", ".join(f"{each.policy} {each.seed}" for each in differ[:20])
        print(f"scenarios that differ (at most 20 told): {others}")
    print(
        f"{len(scenarios)} scenarios against {asked.base[:12]}: {len(differ)} differ; "
        f"{num_lines} lines in {time.monotonic() - started:.0f} s"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
