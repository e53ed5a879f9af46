"""Promises to callers while something else happens: a long prompt, a batch, other work.

Three parts, each of which can be run alone (``PARTS=gaps,background,neighbours``), on live servers
of the default model; the head of each one's file says how it is measured:

* ``gaps``: gaps in streams when a long prompt arrives, with a bound on them and without;
* ``background``: callers who wait for their tokens, next to a batch of thousands of lines;
* ``neighbours``: a server that shares its processors with other work.

Prints tables and, last, one JSON line, in which ``unmeasured`` names what could not be measured,
and why. QUICK=1 takes fewer and shorter rounds, LONG=1 long ones of the last two parts.

    python -m benchmarks.promises
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Final

from benchmarks.common.ours import our_places
from benchmarks.common.parts import chosen
from benchmarks.common.unmeasured import Unmeasured
from paceline.bench.machine import machine

PARTS: Final = ("gaps", "background", "neighbours")


def main() -> int:
    parts = chosen(PARTS)
    places, vocab_size = our_places()
    unmeasured = Unmeasured()
    report: dict[str, Any] = {"bench": "promises", "machine": machine(places.cpus)}
    for part in parts:
        print(f"{part}:", flush=True)
        with unmeasured.part(part):
            measure = importlib.import_module(f"benchmarks.promises.{part}").measure
            report[part] = measure(places, vocab_size, unmeasured)
    settings = {name.lower(): bool(os.environ.get(name)) for name in ("QUICK", "LONG")}
    print(json.dumps(report | settings | {"unmeasured": unmeasured.reasons}))
    return unmeasured.exit_code


if __name__ == "__main__":
    sys.exit(main())
